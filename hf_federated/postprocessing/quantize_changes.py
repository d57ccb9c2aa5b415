"""`QuantizeChanges`: changes of 8 or 4 bits in both directions, with error feedback. `extra` is not quantized."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

from ..codecs import QuantizedBlocks
from ..messages import ClientUpdate, Fit
from ..messages.serialization import PackedPieces
from ..messages.validation import InvalidUpdateError, first_non_finite
from ..utils.weighted_mean import State, wide_dtype
from .base import Memory, Postprocessor


# Name of the setting of a message with the checksum of the state to which its changes are added.
CHECKSUM = "quantize_changes"


class QuantizeChanges(Postprocessor):
    """
    Send quantized changes to the clients and back: `x̂_i ← x̂_i + Q(x − x̂_i)`, `Δ_i = Q(x_i − x̂_i + e_i)`.

    `x` is the global state, `x̂_i` the received state of client `i`, and `x_i` the state that it trained from `x̂_i`.
    The client keeps `e_i ← x_i − x̂_i + e_i − Δ_i` ([Karimireddy et al., 2019](https://arxiv.org/abs/1901.09847)). The
    server aggregates `x + Δ_i`, so errors on the way down do not enter the global state ([Philippenko and Dieuleveut,
    2021](https://arxiv.org/abs/2102.12528)). The first message to a client is exact. After an update that the server
    did not use, both sides return to `x̂_i` and `e_i` of the last accepted update. Integer tensors are sent unchanged.

    Args:
        bits (`int`, *optional*, defaults to `8`): 8 (8.25 bits for each value with the scales) or 4 (5 bits).

    Raises:
        ValueError: If `bits` is neither 8 nor 4. In a run, if values are not finite, or if a side lost its memory.

    Requirements:
        The server keeps one copy of the state for each client, and a client keeps three copies. Steps that change
        values, such as [`ClipUpdate`], come before this step in the list.

    Relations:
        `exchange_dtype` sends 16 bits for each value and needs no memory.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated import QuantizeChanges
    >>> from hf_federated.messages import ClientUpdate, Fit

    >>> step, memory, sent = QuantizeChanges(), {}, Fit(round=0, client_id="a", seed=0, state={"w": torch.zeros(512)})
    >>> update = ClientUpdate(0, "a", {"w": torch.linspace(0, 1, 512)}, num_examples=1, num_tokens=0, num_steps=1)
    >>> packed = step.client_send(update, step.client_receive(step.server_send(sent, {}), memory), memory)
    >>> update.state["w"].nbytes, packed.state["w"].nbytes
    (2048, 528)
    ```
    """

    def __init__(self, bits: int = 8) -> None:
        self.bits = bits
        self._codec = QuantizedBlocks(bits)

    def server_send(self, message: Fit, memory: Memory) -> Fit:
        known = self._settle(message, memory)
        memory["sent"], memory["sent_round"] = self._changes(message.state, known), message.round
        settings = {**message.settings, CHECKSUM: _checksum(known)}
        return dataclasses.replace(message, state=memory["sent"], settings=settings)

    def client_receive(self, message: Fit, memory: Memory) -> Fit:
        known = self._settle(message, memory, message.settings.get(CHECKSUM, "not sent"))
        memory["sent"], memory["sent_round"] = message.state, message.round
        return dataclasses.replace(message, state=self._applied(message.state, known))

    def client_send(self, update: ClientUpdate, message: Fit, memory: Memory) -> ClientUpdate:
        feedback = {"residual": memory.get("residual", {})}
        update = dataclasses.replace(update, state=self._changes(update.state, message.state, feedback))
        memory["next_residual"] = feedback["residual"]
        return update

    def server_receive(self, update: ClientUpdate, state: State, memory: Memory) -> ClientUpdate:
        try:
            return dataclasses.replace(update, state=self._applied(update.state, state))
        except ValueError as error:
            raise InvalidUpdateError(f"Client {update.client_id!r}, round {update.round + 1}: {error}") from error

    def _settle(self, message: Fit, memory: Memory, checksum: Any = None) -> State:
        """Keep or drop what the last message and update changed, and return the state of the client."""
        sent, sent_round, residual = (memory.pop(name, None) for name in ("sent", "sent_round", "next_residual"))
        known, accepted = memory.get("state", {}), message.accepted_round
        if accepted is not None and accepted == sent_round:
            known = self._applied(sent, known)
            memory.update(state=known, round=accepted, residual=residual or {})
        if accepted != memory.get("round") or checksum not in (None, _checksum(known)):
            raise ValueError(
                f"Client {message.client_id!r}, round {message.round + 1}: the memory of QuantizeChanges, of round "
                f"{memory.get('round')}, does not belong to the message with accepted_round={accepted}. Resume the "
                "server and the client from the same checkpoint, or start a new run."
            )
        return known

    def _changes(self, state: State, known: State, feedback: Memory | None = None) -> State:
        state = {name: value.detach().cpu() for name, value in state.items()}
        changed = {name: value for name, value in state.items() if value.is_floating_point() and name in known}
        changes = {name: value.to(wide_dtype(value.dtype)) - known[name].cpu() for name, value in changed.items()}
        # Copies, because the values may be parameters of a model that will change.
        copies = {name: value.clone() for name, value in state.items() if name not in changes}
        return copies | self._codec.encode(changes, feedback)

    def _applied(self, sent: State, known: State) -> State:
        changed = {name: value for name, value in known.items() if value.is_floating_point() and name in sent}
        changes = self._codec.decode({name: sent[name] for name in changed}, changed)
        state = sent | {name: (known[name] + change).to(known[name].dtype) for name, change in changes.items()}
        if (name := first_non_finite(state)) is not None:
            raise ValueError(f"{name!r} has NaN or infinite values, expected finite values.")
        return state


def _checksum(state: State) -> int:
    return functools.reduce(lambda checksum, piece: zlib.crc32(piece, checksum), PackedPieces(state), 0)
