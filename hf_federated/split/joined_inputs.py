"""Join the inputs of the clients in a server batch, and split the outputs by client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ..codecs.bits import unpack_mask
from .messages import Forward


def check_joint(messages: Sequence[Forward]) -> None:
    """
    Check that one forward pass can process the messages of several clients.

    Args:
        messages (`Sequence[Forward]`): One message per client.

    Raises:
        ValueError: If the messages differ in `training`, `grad` or `autocast`, one of several messages uses a cache,
            or a micro-batch occurs twice.
    """
    first = messages[0]
    for message in messages[1:]:
        for name in ("training", "grad", "autocast"):
            if getattr(message, name) != getattr(first, name):
                raise ValueError(
                    f"All clients of a server batch must have the same {name}, but {name} is "
                    f"{getattr(first, name)!r} for client {first.client_id!r} and {getattr(message, name)!r} for "
                    f"client {message.client_id!r}."
                )
    if len(messages) > 1 and any(message.cache_id is not None for message in messages):
        raise ValueError(
            f"{len(messages)} clients sent messages together, and some of them use a cache. Generate with one "
            "client at a time."
        )
    micro_batch_ids = tuple(message.micro_batch_id for message in messages)
    if len(set(micro_batch_ids)) != len(micro_batch_ids):
        raise ValueError(
            f"A micro-batch occurs twice in one server batch: {micro_batch_ids}. Send each micro-batch once."
        )


def join_states(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """
    Join the hidden states of several clients. Shorter sequences are padded with zeros on the right.

    Args:
        states (`Sequence[torch.Tensor]`): One tensor of shape `(batch, sequence, hidden)` per client.

    Returns:
        `torch.Tensor`: Shape `(sum of the batches, longest sequence, hidden)`.
    """
    if len(states) == 1:
        return states[0]
    width = max(tensor.shape[1] for tensor in states)
    return _concatenate([functional.pad(tensor, (0, 0, 0, width - tensor.shape[1])) for tensor in states])


def split_by_client(states: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """
    Return a view of each client's hidden states in a server batch, without the padding of the server batch.

    Args:
        states (`torch.Tensor`): Joined hidden states, as [`join_states`] returns them.
        sizes (`Sequence[tuple[int, int]]`): The batch size and the sequence length of each client.
    """
    if len(sizes) == 1:
        return [states]
    by_client = states.split([batch_size for batch_size, _ in sizes])
    return [client_states[:, :length] for client_states, (_, length) in zip(by_client, sizes, strict=True)]


def join_attention_inputs(
    messages: Sequence[Forward], sizes: Sequence[tuple[int, int]], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """
    Join masks, positions and context lengths of a server batch.

    Args:
        messages (`Sequence[Forward]`): One message per client.
        sizes (`Sequence[tuple[int, int]]`): The batch size and the sequence length of each client.
        device (`torch.device`): The device of the results.

    Returns:
        `tuple`: The attention mask, the position ids and the context lengths. Each is `None` if no client needs it.

    Raises:
        ValueError: If one client packs several sequences into one row and another client pads its sequences.
    """
    width = max(length for _, length in sizes)
    contexts = [message.context_lengths.long() for message in messages if message.context_lengths is not None]
    # Padding on the right is after the context, where no earlier token attends to it, so it needs no mask.
    has_mask = not contexts and any(
        message.mask is not None or length < width for message, (_, length) in zip(messages, sizes, strict=True)
    )
    has_positions = any(message.position_ids is not None for message in messages)
    packed = [message.client_id for message in messages if message.num_sequences > message.batch_size]
    if packed and has_mask and len(messages) > 1:
        # Positions separate packed sequences only if there is no mask. Without a mask, each padding token of the
        # server batch is at position 0 and counts as a separate sequence after the real sequences.
        if any(message.mask is not None for message in messages):
            raise ValueError(
                f"Client {packed[0]!r} sends several sequences packed into one row, but another client of the same "
                "server batch sends padded sequences. Enable packing for all clients, or for no client."
            )
        has_mask = False
    masks, positions = [], []
    for message, (batch_size, length) in zip(messages, sizes, strict=True):
        if has_mask:
            masks.append(functional.pad(_mask(message, batch_size, length), (0, width - length)))
        if has_positions:
            rows = _positions(message, batch_size, length, repeat=len(messages) > 1)
            positions.append(functional.pad(rows, (0, width - length)))
    return (
        _concatenate(masks).to(device) if has_mask else None,
        _concatenate(positions).to(device) if has_positions else None,
        _concatenate(contexts).to(device) if contexts else None,
    )


def _mask(message: Forward, batch_size: int, length: int) -> torch.Tensor:
    """The attention mask of a client. With a cache, it is wider than the sequence."""
    if message.mask is None:
        return torch.ones(batch_size, length, dtype=torch.long)
    return unpack_mask(message.mask, message.mask_width)


def _positions(message: Forward, batch_size: int, length: int, repeat: bool) -> torch.Tensor:
    """The position ids of a client. `repeat` gives each sequence its own row."""
    if message.position_ids is None:
        return torch.arange(length).expand(batch_size, -1)
    positions = message.position_ids.long()
    return positions.expand(batch_size, *positions.shape[1:]) if repeat else positions


def _concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
