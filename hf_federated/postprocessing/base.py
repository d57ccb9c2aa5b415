"""The seam between a client's training and the aggregate: an ordered list of steps with two sides.

Each step may change an update where it leaves the client, in the order of the list, and again where it reaches the
server, in reverse order. Clipping, noise, compression and dtypes are steps. The ledger counts the bytes between the
two sides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..messages import ClientUpdate, Fit
from ..utils.random import derived_seed, isolated_rng


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


def run_client_side(steps: Sequence[Postprocessor], update: ClientUpdate, message: Fit) -> ClientUpdate:
    """All client sides, in order. What they draw follows from the message's seed."""
    if steps:
        with isolated_rng(derived_seed(message.seed, "client side")):
            for step in steps:
                update = step.client_side(update, message)
    return update


def run_server_side(
    steps: Sequence[Postprocessor], update: ClientUpdate, state: dict[str, torch.Tensor], seed: int
) -> ClientUpdate:
    """All server sides, in reverse order. What they draw follows from the seed that the client was sent."""
    if steps:
        with isolated_rng(derived_seed(seed, "server side")):
            for step in reversed(steps):
                update = step.server_side(update, state)
    return update
