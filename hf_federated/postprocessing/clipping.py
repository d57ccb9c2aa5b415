"""Clipping of the norm of client updates."""

from __future__ import annotations

import dataclasses

import torch

from ..messages import ClientUpdate, Fit
from .base import Postprocessor


class ClipUpdate(Postprocessor):
    """
    Clip the norm of a client update: `x_i ← x + (x_i − x) · min(1, S / ‖x_i − x‖₂)`.

    `x` is the state that the client received and `x_i` the state that it trained. The client computes the norm over
    all floating values of the update (McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR
    2018, "flat clipping"). Clipping bounds the influence of one client on the global model, which is the sensitivity
    of differential privacy. Clipping without noise gives no privacy.

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
    >>> ClipUpdate(max_norm=1.0).client_side(update, sent).state["w"]
    tensor([0.6000, 0.8000])
    ```
    """

    def __init__(self, max_norm: float) -> None:
        if not max_norm > 0:
            raise ValueError(f"`max_norm` is {max_norm}; it must be positive.")
        self.max_norm = max_norm

    def client_side(self, update: ClientUpdate, message: Fit) -> ClientUpdate:
        changes = {
            name: value - message.state[name].to(value)
            for name, value in update.state.items()
            if value.is_floating_point()
        }
        norm = torch.stack([change.float().norm() for change in changes.values()]).norm()
        if norm <= self.max_norm:
            return update
        scale = self.max_norm / norm
        clipped = {name: message.state[name].to(change) + change * scale for name, change in changes.items()}
        return dataclasses.replace(update, state={**update.state, **clipped})
