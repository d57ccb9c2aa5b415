"""Narrower dtypes for the exchanged values."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch

from ..messages import ClientUpdate, Fit
from ..messages.narrowed_state import NarrowedState
from ..messages.validation import InvalidUpdateError
from ..utils.shards import ACTIVE
from ..utils.weighted_mean import Tensors
from .base import Memory, Postprocessor, matching


def exchange_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of `exchange_dtype` in [`FederatedConfig`]. `None` keeps the dtypes of the parameters."""
    return None if name is None else getattr(torch, name)


def cast_floating(state: Tensors, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return a state with its floating tensors converted to `dtype`. `None` keeps all dtypes."""
    if dtype is None:
        return dict(state)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def narrowed(state: Tensors, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """
    Return a state in a narrower dtype that is sent to clients. Its values are converted when they are read.

    Args:
        state (`Mapping[str, torch.Tensor]`): The state. Its tensors must not change.
        dtype (`torch.dtype`, *optional*): The dtype of the floating tensors. `None` keeps all dtypes.
    """
    # The lengths of messages with shards are those of whole tensors.
    if dtype is None or ACTIVE:
        return cast_floating(state, dtype)
    return cast("dict[str, torch.Tensor]", NarrowedState(state, dtype))


class SendChanges(Postprocessor):
    """
    Send the changes of a client in a narrower dtype: `Δ_i = cast(x_i − x̃)`, `x_i ← x + Δ_i`.

    `x̃` is the state that the client received.

    A cast of the values instead of the changes would lose every change below the precision of the dtype: bfloat16 has
    8 bits of precision, and a step of 1e-4 on a weight of 1 needs 14. `exchange_dtype` of [`FederatedConfig`] adds
    this step after all other steps.

    Args:
        dtype (`torch.dtype`): Dtype of the sent changes.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages import ClientUpdate, Fit
    >>> from hf_federated.postprocessing import SendChanges

    >>> step, sent = SendChanges(torch.bfloat16), {"w": torch.ones(1)}
    >>> update = ClientUpdate(0, "a", {"w": torch.tensor([1.0001])}, num_examples=1, num_tokens=0, num_steps=1)
    >>> update = step.client_send(update, Fit(round=0, client_id="a", seed=0, state=sent), {})
    >>> update.state["w"].dtype, step.server_receive(update, sent, {}).state["w"]
    (torch.bfloat16, tensor([1.0001]))
    ```
    """

    keeps_server_memory = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def client_send(self, update: ClientUpdate, message: Fit, memory: Memory) -> ClientUpdate:
        changes = {
            name: (value - message.state[name]).to(self.dtype) if self._narrows(value) else value
            for name, value in update.state.items()
        }
        return dataclasses.replace(update, state=changes, extra={**update.extra, **self._narrow(update.extra)})

    def _narrows(self, value: torch.Tensor) -> bool:
        return value.is_floating_point() and value.dtype != self.dtype

    def _narrow(self, extra: Tensors) -> dict[str, torch.Tensor]:
        # A single number, such as a normalizer, keeps its precision.
        return cast_floating({name: value for name, value in extra.items() if value.ndim}, self.dtype)

    def server_receive(self, update: ClientUpdate, state: dict[str, torch.Tensor], memory: Memory) -> ClientUpdate:
        for name, value in (*update.state.items(), *update.extra.items()):
            if self._narrows(value) and (name in update.state or value.ndim):
                raise InvalidUpdateError(
                    f"Client {update.client_id!r}, round {update.round + 1}: {name!r} was sent as {value.dtype}, "
                    f"expected {self.dtype}. Set the same `exchange_dtype` on the server and on all clients."
                )
        # `check_update` rejects unexpected names and shapes later.
        values = {
            name: (state[name] + value).to(state[name].dtype)
            for name, value in matching(update.state, state).items()
            if self._narrows(state[name])
        }
        extra = {
            name: value.to(torch.promote_types(state[name].dtype, torch.float32)) if name in state else value
            for name, value in update.extra.items()
        }
        return dataclasses.replace(update, state={**update.state, **values}, extra=extra)
