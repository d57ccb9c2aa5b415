"""`Teachers`: the models that clients sent, put away until the server distils from them, one in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..adapters import Exchange, copy_model
from ..clients.store import ClientStore
from ..messages import CLASS_COUNT, ClientUpdate
from ..utils.weighted_mean import State, WeightedMean


# `gather(label, tree)`: that of all processes, in their order.
Gather = Callable[[str, Any], list[Any]]


class Teachers:
    """
    What clients sent, by client. Each process has those of the clients that it trained.

    In memory are a copy of the server's model, which shares what is frozen with it, and the values of whichever client
    it stands for; the other clients' values are in the store.

    Args:
        model (`torch.nn.Module`): The server's.
        what (`str`): What of it is exchanged, as `exchange` of [`FederatedConfig`].
        store ([`~hf_federated.clients.ClientStore`]): For what clients sent.
        gather (`Callable`, *optional*): Brings together what all processes have to say; there is one by default.

    Example: [`FedDRS`].
    """

    def __init__(self, model: nn.Module, what: str, store: ClientStore, gather: Gather | None = None) -> None:
        self._servers = model
        self._what = what
        self._store = store
        self._gather: Gather = gather or (lambda label, tree: [tree])
        # Whose are here, with their label histograms.
        self._held: dict[str, list[float]] = {}
        self._copy: tuple[nn.Module, Exchange] | None = None
        # Clients whose updates of this round are in this process.
        self._kept_now: set[str] = set()

    def begin_round(self) -> None:
        """Called before the updates of a round arrive."""
        self._kept_now = set()

    def keep(self, update: ClientUpdate) -> None:
        """Put an accepted update away, in the place of what the client sent before."""
        counts = {name: value for name, value in update.metrics.items() if name.startswith(CLASS_COUNT)}
        # Whoever uses it refuses a histogram with a gap, which is no number.
        histogram = [counts.get(f"{CLASS_COUNT}{label}", math.nan) for label in range(len(counts))]
        self._store.set(update.client_id, {"state": update.state, "class_counts": histogram})
        self._held[update.client_id] = histogram
        self._kept_now.add(update.client_id)

    def settle(self, cohort: Sequence[str]) -> None:
        """
        Remove the models of which another process has received newer ones.

        Args:
            cohort (`Sequence[str]`): Clients whose updates were accepted in this round, in any process.
        """
        for client_id in set(cohort) - self._kept_now:
            self.remove(client_id)

    def remove(self, client_id: str) -> None:
        """Forget what a client sent, if it is here."""
        if self._held.pop(client_id, None) is not None:
            self._store.remove(client_id)

    def everybody(self) -> list[str]:
        """Whose models there are in all processes, sorted."""
        return sorted({client_id for held in self._gather("the teachers", list(self._held)) for client_id in held})

    def here(self, client_ids: Sequence[str]) -> list[str]:
        """Those of some clients whose models are in this process, in their order."""
        return [client_id for client_id in client_ids if client_id in self._held]

    def class_counts(self, client_id: str) -> list[float]:
        """How many rows of each class the client said it has; NaN of those that it left out."""
        return self._held[client_id]

    def open(self, client_id: str) -> nn.Module:
        """A client's model, in evaluation mode, until the next call."""
        if self._copy is None:
            model = copy_model(self._servers)
            self._copy = (model, Exchange(model, self._what))
        model, exchange = self._copy
        exchange.write(self._store.get(client_id)["state"])
        return model.eval()

    def together(self, label: str, found: Mapping[str, Any], client_ids: Sequence[str]) -> dict[str, Any]:
        """
        What all processes found of some clients.

        Args:
            label (`str`): What for, as it stands in an error.
            found (`Mapping[str, Any]`): What this process found, by client: trees of scalars and tensors.
            client_ids (`Sequence[str]`): The order of the result.
        """
        parts = self._gather(label, dict(found))
        return {client_id: part[client_id] for client_id in client_ids for part in parts if client_id in part}

    def mean(self, client_ids: Sequence[str]) -> State:
        """The plain mean of what some clients sent, one of them in memory at a time."""
        mean = WeightedMean()
        for client_id in client_ids:
            own = {client_id: self._store.get(client_id)["state"] for client_id in self.here([client_id])}
            mean.add(self.together(f"what client {client_id!r} sent", own, [client_id])[client_id], 1.0)
        return mean.finalize()

    def forget(self) -> None:
        """Forget all, and give the memory back."""
        self._store.clear()
        self._held = {}
        self._copy = None

    def save(self, directory: Path) -> dict[str, str]:
        """As [`ClientStore.save`]."""
        return self._store.save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """As [`ClientStore.load`]."""
        self._store.load(directory, digests)
        self._held = {client_id: self._store.get(client_id)["class_counts"] for client_id in sorted(digests)}
