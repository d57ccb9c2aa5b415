"""`RoleMixin`: which part a federated trainer plays at the moment, and what a federation adds to its attributes."""

from __future__ import annotations

from datasets import Dataset

from ..adapters import Exchange
from ..aggregation import Aggregation
from ..clients.local_training import LocalTraining
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distillation import Distillation
from ..engines import Engine
from ..messages.ledger import Ledger
from ..postprocessing import Postprocessor
from .federation import FederationRuntime
from .loop_arguments import LoopArgumentsMixin


class RoleMixin(LoopArgumentsMixin):
    """
    A trainer that may be the parent untouched (no runtime), the loop over rounds, or the copy that trains one client.
    """

    _runtime: FederationRuntime | None = None
    _runs_rounds: bool = False
    # Set on the isolated copy that trains one client.
    local_training: LocalTraining | None = None

    @property
    def federation(self) -> FederatedConfig | None:
        """The configuration, with `num_rounds` and the seed filled in; `None` without a federation."""
        return None if self._runtime is None else self._runtime.config

    @property
    def _federation(self) -> FederationRuntime:
        if self._runtime is None:
            raise AttributeError("This trainer has no federation: give it `federation=` or a FederatedDataset.")
        return self._runtime

    @property
    def clients(self) -> FederatedDataset:
        """The clients' training rows."""
        return self._federation.clients

    @property
    def eval_clients(self) -> FederatedDataset | None:
        """The clients' evaluation rows, if `eval_dataset` was a [`FederatedDataset`]."""
        return self._federation.eval_clients

    @property
    def postprocessors(self) -> list[Postprocessor]:
        """The steps between a client's training and the aggregate."""
        return self._federation.postprocessors

    @property
    def exchange(self) -> Exchange:
        """What of the model travels."""
        return self._federation.exchange

    @property
    def aggregation(self) -> Aggregation:
        """The averaging algorithm."""
        return self._federation.aggregation

    @property
    def distillation(self) -> Distillation | None:
        """The distillation algorithm, if there is one."""
        return self._federation.distillation

    @property
    def public_dataset(self) -> Dataset | None:
        """The rows that server and clients have, where there is a distillation."""
        return self._federation.public_dataset

    @property
    def engine(self) -> Engine:
        """Where the clients run; built when training or evaluation starts."""
        return self._federation.loop.engine

    @property
    def ledger(self) -> Ledger:
        """Bytes per client and round."""
        return self._federation.ledger

    @property
    def client_metrics(self) -> dict[str, dict[str, float]]:
        """Each client's metrics of the last evaluation with `evaluate_clients=True`."""
        return self._federation.client_metrics

    @property
    def _is_federating(self) -> bool:
        """Whether this is the loop over rounds, and not a client inside it."""
        return self._runs_rounds and self.local_training is None
