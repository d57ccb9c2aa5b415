"""Clipping of the norm of client updates."""

from __future__ import annotations

import dataclasses

import torch

from ..messages import ClientUpdate, Fit
from ..messages.validation import InvalidUpdateError
from ..utils.arguments import require
from ..utils.shards import norm_over_shards
from ..utils.weighted_mean import Tensors
from .base import Memory, Postprocessor, matching


# Rounding of values and of `exchange_dtype` can raise the norm by less than this share.
TOLERANCE = 0.01


class ClipUpdate(Postprocessor):
    """
    Clip the norm of a client update: `x_i ← x + (x_i − x) · min(1, S / ‖x_i − x‖₂)`.

    `x` is the state that the client received and `x_i` the state that it trained. The client computes the norm over
    all floating values of the update (McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR
    2018, "flat clipping"). Clipping bounds the influence of one client on the global model, which is the sensitivity
    of differential privacy. Clipping without noise gives no privacy.

    The server computes the norm again and rejects an update that the client did not clip, unless a later step adds
    noise.

    Args:
        max_norm (`float`): Largest norm `S`, positive.

    Raises:
        ValueError: If `max_norm` is not positive.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated import ClipUpdate
    >>> from hf_federated.messages import ClientUpdate, Fit

    >>> sent = Fit(round=0, client_id="a", seed=0, state={"w": torch.zeros(2)})
    >>> update = ClientUpdate(0, "a", {"w": torch.tensor([3.0, 4.0])}, num_examples=1, num_tokens=0, num_steps=1)
    >>> ClipUpdate(max_norm=1.0).client_send(update, sent, {}).state["w"]
    tensor([0.6000, 0.8000])
    ```
    """

    def __init__(self, max_norm: float) -> None:
        require("max_norm", max_norm, max_norm > 0, "positive")
        self.max_norm = max_norm

    def client_send(self, update: ClientUpdate, message: Fit, memory: Memory) -> ClientUpdate:
        changes = _changes(update, message.state)
        norm = _norm(changes)
        if norm <= self.max_norm:
            return update
        scale = self.max_norm / norm
        clipped = {name: message.state[name].to(change) + change * scale for name, change in changes.items()}
        return dataclasses.replace(update, state={**update.state, **clipped})

    def check_update(self, update: ClientUpdate, state: dict[str, torch.Tensor]) -> None:
        norm = float(_norm(_changes(update, state)))
        # NaN is rejected by the check of the values, which names the tensor.
        if norm > self.max_norm * (1 + TOLERANCE):
            raise InvalidUpdateError(
                f"Client {update.client_id!r}, round {update.round + 1}: the norm of its change is {norm:.4g}, but "
                f"ClipUpdate(max_norm={self.max_norm:g}) limits it. Pass the same postprocessors on all clients."
            )


def _changes(update: ClientUpdate, state: Tensors) -> dict[str, torch.Tensor]:
    """Return the changes of the floating values. A later check rejects unexpected names and shapes."""
    return {name: value - state[name].to(value) for name, value in matching(update.state, state).items()}


def _norm(changes: Tensors) -> torch.Tensor:
    if not changes:
        return torch.zeros(())
    return norm_over_shards(torch.stack([change.float().norm() for change in changes.values()]).norm())
