"""Postprocessors: an ordered list of steps between local training and aggregation.

Each step has a client side and a server side. The client sides change an update before it is sent, in the order of the
list. The server sides change the update after it is received, in reverse order. Clipping, noise, compression and
conversion of dtypes are steps. The ledger counts the bytes between the two sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ..messages import ClientUpdate, Fit
from ..utils.random import derived_seed, isolated_rng


class Postprocessor:
    """
    Step between local training and aggregation. The two sides share the constructor arguments but no state.

    Both sides may draw random numbers from the global generators of torch, numpy and Python. The generators are seeded
    from the seed of the run, the client and the round, and restored afterwards. Each update therefore gets different
    noise, and a run has the same noise with any number of processes. A private generator of a step has neither
    property.

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

    # Whether the client side adds noise. The server then cannot check what earlier steps of the list did.
    adds_noise: ClassVar[bool] = False

    def client_side(self, update: ClientUpdate, message: Fit) -> ClientUpdate:
        """
        Change an update before it leaves the client.

        Args:
            update ([`ClientUpdate`]): Result of local training or of the preceding step.
            message ([`Fit`]): Message that the client received.

        Returns:
            [`ClientUpdate`]: The changed update.
        """
        return update

    def server_side(self, update: ClientUpdate, state: dict[str, torch.Tensor]) -> ClientUpdate:
        """
        Change an update when it reaches the server.

        Args:
            update ([`ClientUpdate`]): Received update, or the result of the following step of the list.
            state (`dict[str, torch.Tensor]`): The global state that was sent to the client.

        Returns:
            [`ClientUpdate`]: The changed update.
        """
        return update

    def check_update(self, update: ClientUpdate, state: dict[str, torch.Tensor]) -> None:
        """
        Check that the client carried out this step. It is called after `server_side` if no later step adds noise.

        Args:
            update ([`ClientUpdate`]): The update after `server_side`.
            state (`dict[str, torch.Tensor]`): The global state that was sent to the client.

        Raises:
            ValueError: If the client did not carry out the step. The server then rejects the update.
        """


def run_client_side(steps: Sequence[Postprocessor], update: ClientUpdate, message: Fit) -> ClientUpdate:
    """Run all client sides in order. Their random numbers depend on the seed of the message."""
    if steps:
        with isolated_rng(derived_seed(message.seed, "client side")):
            for step in steps:
                update = step.client_side(update, message)
    return update


def run_server_side(
    steps: Sequence[Postprocessor], update: ClientUpdate, state: dict[str, torch.Tensor], seed: int
) -> ClientUpdate:
    """Run all server sides in reverse order. Their random numbers depend on the seed that was sent to the client."""
    if steps:
        with isolated_rng(derived_seed(seed, "server side")):
            is_noisy = False
            for step in reversed(steps):
                update = step.server_side(update, state)
                if not is_noisy:
                    step.check_update(update, state)
                is_noisy = is_noisy or step.adds_noise
    return update
