"""The seam between a client's training and the aggregate: an ordered list of steps with two sides.

Each step may change an update where it leaves the client, in the order of the list, and again where it reaches the
server, in reverse order, so that what the last step packed is unpacked first. Clipping, noise, compression and dtypes
live here, and the ledger counts what travels between the two sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..messages.messages import ClientUpdate, Fit
from ..messages.validation import InvalidUpdateError
from ..utils.random import derived_seed, own_draws


class Postprocessor:
    """
    A step between a client's training and the aggregate. The sides share constructor arguments and no state.

    Either side may draw from the global generators of torch, numpy and Python: they are seeded for it from the run's
    seed, the client and the round, and put back afterwards. So no two updates get the same noise, and the same run has
    the same noise over any number of processes. A generator of the step's own has none of this.

    Example:

    ```python
    >>> import dataclasses

    >>> from hf_federated import Postprocessor

    >>> class SendBfloat16(Postprocessor):
    ...     def client_side(self, update, message):
    ...         state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in update.state.items()}
    ...         return dataclasses.replace(update, state=state)
    ...
    ...     def server_side(self, update, state):
    ...         return dataclasses.replace(update, state={k: v.to(state[k].dtype) for k, v in update.state.items()})
    ```
    """

    def client_side(self, update: ClientUpdate, message: Fit) -> ClientUpdate:
        """
        Change an update before it leaves the client.

        Args:
            update ([`ClientUpdate`]): What training, or the step before this one, made.
            message ([`Fit`]): What the client received.
        """
        return update

    def server_side(self, update: ClientUpdate, state: dict[str, torch.Tensor]) -> ClientUpdate:
        """
        Change an update when it reaches the server.

        Args:
            update ([`ClientUpdate`]): What came, or what the step after this one made of it.
            state (`dict[str, torch.Tensor]`): The global state that was sent.
        """
        return update


class ClipUpdate(Postprocessor):
    """
    Bounds how far one client can move the global model: `x_i ← x + (x_i − x) · min(1, S / ‖x_i − x‖₂)`.

    The norm is taken over all floating values that travel, on the client (McMahan et al., Learning Differentially
    Private Recurrent Language Models, ICLR 2018, "flat clipping"). It bounds the sensitivity that differential privacy
    needs; without noise it gives no privacy.

    Args:
        max_norm (`float`): `S`, positive.

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


def cast_floating(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """A state with its floating tensors in another dtype; `None` leaves all as they are."""
    if dtype is None:
        return dict(state)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


class SendChanges(Postprocessor):
    """
    What a client changed travels, in a narrower dtype: `Δ_i = cast(x_i − x̃)`, `x_i ← x + Δ_i`, where `x̃` is what the
    client received.

    A cast of the values themselves would lose every change below their precision: bfloat16 has 8 bits, and a step of
    1e-4 on a weight of 1 needs 14. `exchange_dtype` of [`FederatedConfig`] installs it after all other steps.

    Args:
        dtype (`torch.dtype`): Of what travels.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages import ClientUpdate, Fit
    >>> from hf_federated.postprocessing import SendChanges

    >>> step, sent = SendChanges(torch.bfloat16), {"w": torch.ones(1)}
    >>> update = ClientUpdate(0, "a", {"w": torch.tensor([1.0001])}, num_examples=1, num_tokens=0, num_steps=1)
    >>> update = step.client_side(update, Fit(round=0, client_id="a", seed=0, state=sent))
    >>> update.state["w"].dtype, step.server_side(update, sent).state["w"]
    (torch.bfloat16, tensor([1.0001]))
    ```
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def client_side(self, update: ClientUpdate, message: Fit) -> ClientUpdate:
        changes = {
            name: (value - message.state[name]).to(self.dtype) if self._narrows(value) else value
            for name, value in update.state.items()
        }
        return dataclasses.replace(update, state=changes, extra=cast_floating(update.extra, self.dtype))

    def _narrows(self, value: torch.Tensor) -> bool:
        return value.is_floating_point() and value.dtype != self.dtype

    def server_side(self, update: ClientUpdate, state: dict[str, torch.Tensor]) -> ClientUpdate:
        for name, value in (*update.state.items(), *update.extra.items()):
            if value.is_floating_point() and value.dtype != self.dtype:
                raise InvalidUpdateError(
                    f"Client {update.client_id!r}, round {update.round}: {name!r} travelled as {value.dtype}, "
                    f"expected {self.dtype}, which `exchange_dtype` agrees on."
                )
        # A name that was not asked for, or another shape, is for the check to refuse.
        values = {
            name: (state[name] + value).to(state[name].dtype)
            if name in state and self._narrows(state[name]) and value.shape == state[name].shape
            else value
            for name, value in update.state.items()
        }
        extra = {
            name: value.to(torch.promote_types(state[name].dtype, torch.float32)) if name in state else value
            for name, value in update.extra.items()
        }
        return dataclasses.replace(update, state=values, extra=extra)


def run_client_side(steps: Sequence[Postprocessor], update: ClientUpdate, message: Fit) -> ClientUpdate:
    """All client sides, in order. What they draw follows from the message's seed."""
    if steps:
        with own_draws(derived_seed(message.seed, "client side")):
            for step in steps:
                update = step.client_side(update, message)
    return update


def run_server_side(
    steps: Sequence[Postprocessor], update: ClientUpdate, state: dict[str, torch.Tensor], seed: int
) -> ClientUpdate:
    """All server sides, in reverse order. What they draw follows from the seed that the client was sent."""
    if steps:
        with own_draws(derived_seed(seed, "server side")):
            for step in reversed(steps):
                update = step.server_side(update, state)
    return update
