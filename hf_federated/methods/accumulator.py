"""`Accumulator`: the sums of the updates of a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..messages import ClientUpdate
from ..utils.weighted_mean import State, WeightedMean
from .update_collection import UpdateCollection


class Accumulates(Protocol):
    """An algorithm that adds updates to an accumulator."""

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        """Add an update."""


class Accumulator:
    """
    Streaming means of the updates of one round. It keeps no update in memory.

    Each process of a launch accumulates the updates of its clients. The engine reduces every mean in `means` over the
    processes, and completes every collection in `collections`, before it calls [`Aggregation.aggregate`]. An algorithm
    that needs another mean or a collection creates it in [`Aggregation.accumulator`] and adds to it in
    [`Aggregation.accumulate`].

    Args:
        algorithm ([`Aggregation`]): The algorithm that adds the updates.
        state (`Mapping[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of the state of an update.
        extra (`Mapping[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of `extra` of an update.

    Attributes:
        means (`dict[str, WeightedMean]`): The means, by name. `"state"` is the weighted mean of the states of the
            updates, `"extra"` the uniform mean of their `extra`.
        collections (`dict[str, UpdateCollection]`): The updates of all clients on disk, by name, for algorithms that
            compare updates. Empty for all other algorithms.
        order (`Mapping[str, int]`): Position of each client in the cohort. Integer and boolean tensors are those of
            the client with the lowest position, so they do not depend on the order in which updates arrive.
        first_client (`str`, *optional*): Id of the client with the lowest position whose update was added.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import FedAvg
    >>> from hf_federated.messages import ClientUpdate

    >>> accumulator = FedAvg().accumulator({"w": torch.zeros(1)})
    >>> accumulator.add(ClientUpdate(0, "a", {"w": torch.ones(1)}, num_examples=3, num_tokens=0, num_steps=1))
    >>> accumulator.add(ClientUpdate(0, "b", {"w": torch.zeros(1)}, num_examples=1, num_tokens=0, num_steps=1))
    >>> accumulator.mean.finalize()
    {'w': tensor([0.7500])}
    ```
    """

    def __init__(self, algorithm: Accumulates, state: State, extra: State) -> None:
        self._algorithm = algorithm
        self.means = {"state": WeightedMean(state), "extra": WeightedMean(extra)}
        self.collections: dict[str, UpdateCollection] = {}
        self.order: Mapping[str, int] = {}
        self.first_client: str | None = None

    @property
    def mean(self) -> WeightedMean:
        """Weighted mean of the states of the updates."""
        return self.means["state"]

    @property
    def extra(self) -> WeightedMean:
        """Uniform mean of `extra` of the updates."""
        return self.means["extra"]

    @property
    def num_updates(self) -> int:
        """Number of updates added."""
        return max(self.mean.num_updates, *(len(collection) for collection in self.collections.values()), 0)

    def merge(self, other: Accumulator) -> None:
        """Add all updates of another accumulator of the same round."""
        is_first = other.first_client is not None and self._is_first(other.first_client)
        if is_first:
            self.first_client = other.first_client
        for name, mean in self.means.items():
            mean.merge(other.means[name], takes_others=is_first)
        for name, collection in self.collections.items():
            collection.merge(other.collections[name])

    def clear(self) -> None:
        """Remove the updates that are on disk."""
        for collection in self.collections.values():
            collection.clear()

    def add(self, update: ClientUpdate) -> None:
        """Add the update of one client."""
        is_first = self._is_first(update.client_id)
        if is_first:
            self.first_client = update.client_id
        for mean in self.means.values():
            mean.takes_others = is_first
        self._algorithm.accumulate(self, update)

    def _is_first(self, client_id: str) -> bool:
        """Whether a client precedes all clients whose updates were added."""
        if self.first_client is None:
            return True
        last = len(self.order)
        return self.order.get(client_id, last) < self.order.get(self.first_client, last)
