"""`Accumulator`: the sums of the updates of a round."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from ..messages import ClientUpdate
from ..utils.weighted_mean import State, WeightedMean
from ..utils.weighted_sums import WeightedSums
from .update_collection import UpdateCollection


Contribution = Mapping[str, WeightedSums]
"""The sums of an update, or of several updates, by the name of the mean."""


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
        state (`Mapping[str, torch.Tensor]`): The global state that the clients received, with the names, shapes and
            dtypes of the state of an update.
        extra (`Mapping[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of `extra` of an update.

    Attributes:
        means (`dict[str, WeightedMean]`): The means, by name. `"state"` is the weighted mean of the states of the
            updates, `"extra"` the uniform mean of their `extra`.
        collections (`dict[str, UpdateCollection]`): The updates of all clients on disk, by name, for algorithms that
            compare updates. Empty for all other algorithms.
        reference (`Mapping[str, torch.Tensor]`): The global state that the clients received, for algorithms that need
            the change of a client. Empty if updates contain no state.
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
    >>> update = ClientUpdate(0, "c", {"w": torch.ones(1)}, num_examples=4, num_tokens=0, num_steps=1)
    >>> accumulator.load_sums([accumulator.contribution(update)])
    >>> accumulator.mean.finalize()
    {'w': tensor([0.8750])}
    ```
    """

    def __init__(self, algorithm: Accumulates, state: State, extra: State) -> None:
        self._algorithm = algorithm
        self.reference = state
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
    def shapes(self) -> dict[str, dict[str, torch.Size]]:
        """Shapes of the floating tensors of each mean, which are those of a contribution."""
        return {name: mean.shapes for name, mean in self.means.items()}

    @property
    def num_updates(self) -> int:
        """Number of updates added."""
        return max(self.mean.num_updates, *(len(collection) for collection in self.collections.values()), 0)

    def merge(self, other: Accumulator) -> None:
        """Add all updates of another accumulator of the same round."""
        is_first = self._set_first(other.first_client)
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
        is_first = self._set_first(update.client_id)
        for mean in self.means.values():
            mean.takes_others = is_first
        self._algorithm.accumulate(self, update)

    @property
    def is_linear(self) -> bool:
        """Whether the sums of the clients' contributions replace their updates."""
        return not self._reason_against_sums()

    def contribution(self, update: ClientUpdate, reference: State | None = None) -> dict[str, WeightedSums]:
        """
        Compute what an update adds to the sums. The accumulator does not change.

        The names, shapes and order of the values depend only on the references of the means. They are the same for all
        clients, so contributions can be added and serialized. Integer and boolean tensors are not part of them.

        The values are computed from the tensors of the update each time they are read, so that a contribution takes no
        memory. The tensors of the update and of the reference must not change before the last reading. `dict(values)`
        is a copy.

        The party that adds a contribution chooses the weight in it, and a sum of contributions shows the total weight
        only. A receiver of such a sum cannot compare the weight of one client with what the client announced, so a
        protocol for secure sums must bound the weight, for example by `max_examples_per_client`.

        Args:
            update ([`ClientUpdate`]): An update that passed all checks.
            reference (`dict[str, torch.Tensor]`, *optional*): The global state that the client received. The values of
                the mean `"state"` are then weighted changes `w (x − reference)` instead of `w x`. All other means
                contain `w x`. Each difference and product is computed in float64 (see [`WeightedMean.sums`]).

        Returns:
            `dict[str, WeightedSums]`: Weight and float64 sums, by the name of the mean. Their `values` are
                [`LazyTensors`].

        Raises:
            ValueError: If the accumulator is not linear, or if the tensors are not those of the references.
        """
        self._check_linear()
        single = copy.copy(self)
        single.means = {name: mean.empty(copies=False) for name, mean in self.means.items()}
        single.add(update)
        return {name: mean.sums(_center(name, reference), lazy=True) for name, mean in single.means.items()}

    def load_sums(self, contributions: Iterable[Contribution], reference: State | None = None) -> None:
        """
        Add the updates of contributions, as if [`~Accumulator.add`] had been called with each of them.

        The means then contain the integer and boolean tensors of their references, which are those of the global state
        for the mean `"state"`.

        Args:
            contributions (`Iterable[Mapping[str, WeightedSums]]`): Return values of [`~Accumulator.contribution`], or
                a list with their sum.
            reference (`dict[str, torch.Tensor]`, *optional*): The reference of the contributions.

        Raises:
            ValueError: If the accumulator is not linear, or if the names and shapes are not those of its means.
        """
        self._check_linear()
        totals: dict[str, WeightedSums] = {}
        for contribution in contributions:
            if contribution.keys() != self.means.keys():
                raise ValueError(
                    f"A contribution has the means {sorted(contribution)}, but the accumulator has the means "
                    f"{sorted(self.means)}. Use the same algorithm on the server and on all clients."
                )
            totals = {name: totals[name] + sums if totals else sums for name, sums in contribution.items()}
        for name, sums in totals.items():
            self.means[name].add_sums(sums, _center(name, reference))

    def _check_linear(self) -> None:
        if reason := self._reason_against_sums():
            raise ValueError(f"Sums of updates are not sufficient for {self._algorithm!r}: {reason}")

    def _reason_against_sums(self) -> str:
        """Return why sums do not replace the updates, and the alternative. An empty text if sums are sufficient."""
        if self.collections:
            return (
                "it compares the updates of the clients. Use an algorithm that needs only sums, such as FedAvg, or "
                "NormBoundedMean with `max_norm` if no LoRA module trains both factors."
            )
        # The integers of the state are those of the server. The server has no values for other integers.
        known = set(self.mean.other_names)
        for mean_name, mean in self.means.items():
            if unknown := [name for name in mean.other_names if name not in known]:
                return (
                    f"it reads the integer tensor {unknown[0]!r} of a client (mean {mean_name!r}), but only floating "
                    "tensors are summed. Use a floating tensor."
                )
        return ""

    def _set_first(self, client_id: str | None) -> bool:
        """Set `first_client` if a client precedes all clients whose updates were added, and return whether it does."""
        before, position_of, last = self.first_client, self.order.get, len(self.order)
        if client_id is None or (before is not None and position_of(before, last) <= position_of(client_id, last)):
            return False
        self.first_client = client_id
        return True


def _center(name: str, reference: State | None) -> State | None:
    """Return the center of a mean. A tensor of another mean may have the name of a parameter and other values."""
    return reference if name == "state" else None
