"""`Teachers`: a store of the clients' models. The server loads one model at a time for distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..adapters import Exchange, copy_model
from ..clients.store import ClientStore
from ..messages import ClientUpdate
from ..utils.selection import Selection
from ..utils.weighted_mean import State, WeightedMean
from .class_counts import reported_class_counts


# `gather(label, tree)` returns the trees of all processes, in the order of their ranks.
Gather = Callable[[str, Any], list[Any]]


class Teachers:
    """
    The parameters that clients sent, by client. Each process stores the parameters of the clients that it trained.

    Memory holds one copy of the server's model, which shares its frozen parameters with the server's model. The
    parameters of one client at a time are written into the copy. The parameters of all clients are in the store.

    Args:
        model (`torch.nn.Module`): The server's model.
        exchange (`str`, `Sequence[str]` or `Callable`): The exchanged tensors, as `exchange` of [`FederatedConfig`].
        store ([`~hf_federated.clients.ClientStore`]): Stores the clients' parameters.
        gather (`Callable`, *optional*): Gathers a tree from all processes. By default, there is one process.

    Example: [`FedDRS`].
    """

    def __init__(
        self, model: nn.Module, exchange: Selection, store: ClientStore, gather: Gather | None = None
    ) -> None:
        self._server_model = model
        self._exchange = exchange
        self._store = store
        self._gather: Gather = gather or (lambda label, tree: [tree])
        # Label histograms of the clients whose models this process stores.
        self._histograms: dict[str, list[float]] = {}
        self._copy: tuple[nn.Module, Exchange] | None = None
        # Clients whose updates this process received in this round.
        self._received_this_round: set[str] = set()

    def begin_round(self) -> None:
        """Called before the updates of a round arrive."""
        self._received_this_round = set()

    def keep(self, update: ClientUpdate) -> None:
        """Store an accepted update. It replaces the previous update of the client."""
        # `PseudoSampler` raises an error for a missing number.
        histogram = reported_class_counts(update.metrics)
        self._store.set(update.client_id, {"state": update.state, "class_counts": histogram})
        self._histograms[update.client_id] = histogram
        self._received_this_round.add(update.client_id)

    def discard_outdated(self, cohort: Sequence[str]) -> None:
        """
        Remove the models of clients whose newer updates another process received.

        Args:
            cohort (`Sequence[str]`): Clients whose updates were accepted in this round, in any process.
        """
        for client_id in set(cohort) - self._received_this_round:
            self.remove(client_id)

    def discard_received(self, client_id: str) -> None:
        """Remove the model that a client sent in this round, because its update was rejected afterwards."""
        if client_id in self._received_this_round:
            self.remove(client_id)

    def remove(self, client_id: str) -> None:
        """Remove the model of a client, if this process stores it."""
        if self._histograms.pop(client_id, None) is not None:
            self._store.remove(client_id)

    def client_ids(self) -> list[str]:
        """The sorted ids of the clients whose models any process stores."""
        return sorted(set().union(*self._gather("the teachers", list(self._histograms))))

    def local_clients(self, client_ids: Sequence[str]) -> list[str]:
        """Select the clients whose models this process stores, in the given order."""
        return [client_id for client_id in client_ids if client_id in self._histograms]

    def class_counts(self, client_id: str) -> list[float]:
        """The number of examples of each class that a client reported. NaN for a class without a number."""
        return self._histograms[client_id]

    def open(self, client_id: str) -> nn.Module:
        """Load a client's model in evaluation mode. It is valid until the next call."""
        if self._copy is None:
            model = copy_model(self._server_model)
            self._copy = (model, Exchange(model, self._exchange))
        model, exchange = self._copy
        exchange.write(self._store.get(client_id)["state"])
        return model.eval()

    def gather_results(self, label: str, found: Mapping[str, Any], client_ids: Sequence[str]) -> dict[str, Any]:
        """
        Gather results for some clients from all processes.

        Args:
            label (`str`): Purpose of the call, for error messages.
            found (`Mapping[str, Any]`): Results of this process, by client: trees of scalars and tensors.
            client_ids (`Sequence[str]`): Clients, in the order of the returned dictionary.

        Returns:
            `dict[str, Any]`: Results of all processes, by client.
        """
        parts = self._gather(label, dict(found))
        return {client_id: part[client_id] for client_id in client_ids for part in parts if client_id in part}

    def mean(self, client_ids: Sequence[str]) -> State:
        """The unweighted mean of the parameters of some clients. Loads one client's parameters at a time."""
        mean = WeightedMean()
        for client_id in client_ids:
            own = {client_id: self._store.get(client_id)["state"] for client_id in self.local_clients([client_id])}
            mean.add(self.gather_results(f"parameters of client {client_id!r}", own, [client_id])[client_id], 1.0)
        return mean.finalize()

    def clear(self) -> None:
        """Remove all models and free their memory."""
        self._store.clear()
        self._histograms = {}
        self._copy = None

    def save(self, directory: Path) -> dict[str, str]:
        """Save the models of this process, as [`ClientStore.save`] does."""
        return self._store.save(directory)

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """Load saved models, as [`ClientStore.load`] does."""
        self._store.load(directory, digests)
        self._histograms = {client_id: self._store.get(client_id)["class_counts"] for client_id in sorted(digests)}
