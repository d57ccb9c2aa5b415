"""The arguments of [`SplitModel.forward`]: checks, and what each part of the model gets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from .cache import SplitCache
from .layouts import AttentionInputs
from .parts import Part


# Arguments of `forward` that are accepted and ignored.
_IGNORED_ARGUMENTS = ("return_dict", "cache_position")
# Boundaries of packed sequences for attention kernels. They are ignored, because every part derives the boundaries
# from the positions.
_PACKING_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# Arguments of the loss, which are passed to the tail with the labels.
_LOSS_ARGUMENTS = ("num_items_in_batch", "shift_labels")


@dataclass
class PartInputs:
    """
    The inputs of the parts in one call.

    Args:
        states (`torch.Tensor`): Token ids of shape `(batch, sequence)`, or embeddings.
        attention_mask (`torch.Tensor`, *optional*): Shape `(batch, past + sequence)`. `None` if no token is masked.
        position_ids (`torch.Tensor`, *optional*): The positions, if they are not the default positions.
        context_lengths (`torch.Tensor`, *optional*): Shape `(batch,)`, if the layout's runner requires them.
        seen (`int`): Number of positions in the cache.
        tokens (`torch.Tensor`, *optional*): All token ids so far, if the layout's runner requires them.
    """

    states: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    context_lengths: torch.Tensor | None
    seen: int
    tokens: torch.Tensor | None

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the batch."""
        return len(self.states)

    @property
    def num_positions(self) -> int:
        """Number of positions that the cache holds after the call."""
        return self.seen + self.states.shape[1]


def prepare_inputs(
    head: Part,
    config: PretrainedConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: SplitCache | None,
) -> PartInputs:
    """
    Check the inputs of a model, and leave out what every part computes itself.

    Args:
        head ([`Part`]): The client's first blocks.
        config (`PretrainedConfig`): The config of the full model.
        input_ids (`torch.Tensor`, *optional*): Shape `(batch, sequence)`.
        inputs_embeds (`torch.Tensor`, *optional*): Shape `(batch, sequence, hidden)`, in place of `input_ids`.
        attention_mask (`torch.Tensor`, *optional*): Shape `(batch, past + sequence)`.
        position_ids (`torch.Tensor`, *optional*): Shape `(batch or 1, sequence)`.
        cache ([`SplitCache`], *optional*): The cache of the previous tokens.

    Raises:
        ValueError: If not exactly one of token ids and embeddings is passed, the mask has another shape, or a sequence
            is too long.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}, but it must be (batch, sequence).")
    states = input_ids if inputs_embeds is None else inputs_embeds
    if states is None or (input_ids is not None and inputs_embeds is not None):
        given = "neither was" if states is None else "both were"
        raise ValueError(f"The model needs either input_ids or inputs_embeds, but {given} passed. Pass one of them.")
    seen = 0 if cache is None else cache.get_seq_length()
    runner = head.layout.runner
    # Packed sequences each start at position 0, so a packed row may be longer than the limit. Runners count
    # positions differently: for them the length of a row must not exceed the limit.
    if position_ids is None or runner is not None:
        head.check_length(seen + states.shape[1])
    else:
        head.check_length(int(position_ids.max()) + 1)
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    if position_ids is not None and attention_mask is None and _is_range(position_ids, seen):
        position_ids = None
    if runner is None:
        return PartInputs(states, attention_mask, position_ids, None, seen, None)
    if input_ids is None:
        raise ValueError("This model computes positions from token ids, but inputs_embeds was passed. Pass input_ids.")
    tokens = input_ids
    if cache is not None and cache.tokens is not None:
        tokens = torch.cat((cache.tokens, input_ids), dim=1)
    inputs = runner.attention_inputs(config, tokens, AttentionInputs(attention_mask, position_ids), seen)
    return PartInputs(states, attention_mask, inputs.position_ids, inputs.context_lengths, seen, tokens)


def _is_range(position_ids: torch.Tensor, start: int) -> bool:
    """Whether the positions are the default positions, which every part computes."""
    expected = torch.arange(start, start + position_ids.shape[1], device=position_ids.device)
    return bool((position_ids == expected).all())


def loss_arguments(kwargs: dict[str, Any], tail: Part, packed: bool) -> dict[str, Any]:
    """
    Return the arguments of the loss.

    Args:
        kwargs (`dict[str, Any]`): The additional arguments of the call.
        tail ([`Part`]): The client's last blocks.
        packed (`bool`): Whether positions were passed, which can separate packed sequences.

    Raises:
        ValueError: If an argument requests outputs that the server does not send.
        TypeError: If a split model does not support an argument.
    """
    ignored = _IGNORED_ARGUMENTS + (_PACKING_ARGUMENTS if packed else ())
    # Some tokenizers return token type ids for every model. GPT-2, for example, has the argument.
    if "token_type_ids" in kwargs and "token_type_ids" not in inspect.signature(tail.model.forward).parameters:
        ignored += ("token_type_ids",)
    remaining = {name: value for name, value in kwargs.items() if name not in ignored and value is not None}
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if remaining.pop(name, False):
            raise ValueError(
                f"{name}=True is not supported in a split model, because the server does not send its attentions, "
                "intermediate hidden states and router logits. Use the full model."
            )
    arguments: dict[str, Any] = {name: remaining.pop(name) for name in _LOSS_ARGUMENTS if name in remaining}
    if remaining:
        raise TypeError(
            f"A split model does not support the arguments {sorted(remaining)}: only declared inputs are sent to the "
            "server. Remove them."
        )
    return arguments


def count_targets(loss_type: str | None, labels: torch.Tensor | None, shifted: torch.Tensor | None) -> int:
    """
    Count the target tokens of a batch, as `Trainer` does, because the loss is divided by this number.

    Args:
        loss_type (`str`, *optional*): The loss type of the model.
        labels (`torch.Tensor`, *optional*): The labels, shape `(batch, sequence)`.
        shifted (`torch.Tensor`, *optional*): The labels of the next tokens, if the caller has shifted them.

    Raises:
        ValueError: If no labels are passed.
    """
    if shifted is None:
        if labels is None:
            raise ValueError(
                "Clients that share a server step send their number of target tokens, but no labels were passed. "
                "Pass labels."
            )
        shifted = labels[:, 1:] if LOSS_MAPPING.get(loss_type) is ForCausalLMLoss else labels
    return int((shifted != -100).sum())
