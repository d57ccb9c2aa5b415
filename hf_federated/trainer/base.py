"""The roles of a federated trainer, and the attributes that a federation adds to a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from datasets import Dataset
from transformers import TrainingArguments

from ..adapters import Exchange
from ..aggregation import Aggregation
from ..clients.local_training import LocalTraining
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distillation import Distillation
from ..engines import Engine
from ..messages.ledger import Ledger
from ..postprocessing import Postprocessor
from ..server import UpdateCollector
from .federation import Federation
from .join import JoinedClient
from .optimizer_factories import OptimizerFactories
from .setup import FederationSetup


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class LoopArgumentsMixin(_Base):
    """A trainer that keeps the user's training arguments while `args` contains those of the training loop."""

    args: TrainingArguments
    _user_args: TrainingArguments

    @property
    def run_args(self) -> TrainingArguments:
        """The user's training arguments. During training, `args` contains the arguments of the training loop."""
        return self._user_args

    @contextmanager
    def _arguments(self, args: TrainingArguments) -> Iterator[None]:
        """Replace `args` inside the context."""
        before, self.args = self.args, args
        try:
            yield
        finally:
            self.args = before


class RoleMixin(LoopArgumentsMixin):
    """
    A trainer in one of three roles: a plain trainer without a federation, the loop over rounds, or a client's copy.
    """

    _setup: FederationSetup | None = None
    # Set when the rounds or the first evaluation of the clients start.
    _running: Federation | None = None
    # Whether this trainer runs the loop over rounds and is not a client inside the loop.
    _is_federating: bool = False
    _optimizer_factories: OptimizerFactories
    # Set while this process is one client of a federation whose server is on another machine.
    _joined: JoinedClient | None = None
    # Set on the isolated copy that trains one client.
    local_training: LocalTraining | None = None

    @property
    def federation(self) -> FederatedConfig | None:
        """The configuration, with `num_rounds` and the seed filled in; `None` without a federation."""
        return None if self._setup is None else self._setup.config

    @property
    def _federation_setup(self) -> FederationSetup:
        if self._setup is None:
            raise AttributeError("This trainer has no federation. Pass `federation` or a FederatedDataset.")
        return self._setup

    @property
    def _federation(self) -> Federation:
        if self._running is None:
            # A subclass of `FederatedTrainer` can override the method that starts the rounds.
            raise AttributeError(
                "The rounds have not started. `train()` starts them in `FederatedTrainer.create_scheduler`. If you "
                "override this method, call `super().create_scheduler(num_training_steps, optimizer)`."
            )
        return self._running

    @property
    def clients(self) -> FederatedDataset:
        """The clients' training examples."""
        return self._federation_setup.clients

    @property
    def eval_clients(self) -> FederatedDataset | None:
        """The clients' evaluation examples, if `eval_dataset` was a [`FederatedDataset`]."""
        return self._federation_setup.eval_clients

    @property
    def postprocessors(self) -> list[Postprocessor]:
        """The steps between a client's training and the aggregate."""
        return self._federation_setup.postprocessors

    @property
    def exchange(self) -> Exchange:
        """Reads and writes the exchanged parameters of the model."""
        return self._federation_setup.exchange if self._running is None else self._running.exchange

    @property
    def aggregation(self) -> Aggregation:
        """The averaging algorithm."""
        return self._federation_setup.aggregation

    @property
    def distillation(self) -> Distillation | None:
        """The distillation algorithm, if there is one."""
        return self._federation_setup.distillation

    @property
    def collector(self) -> UpdateCollector:
        """How the server obtains the updates of a round."""
        return self._federation_setup.collector

    @property
    def public_dataset(self) -> Dataset | None:
        """The public examples of the distillation."""
        return self._federation_setup.participants.public_dataset

    @property
    def server_dataset(self) -> Dataset | None:
        """The labeled examples of the server."""
        return self._federation_setup.participants.server_dataset

    @property
    def engine(self) -> Engine:
        """The engine that runs the clients."""
        return self._federation_setup.engine

    @property
    def ledger(self) -> Ledger:
        """Bytes sent and received, by round and client."""
        return self._federation_setup.engine.ledger

    @property
    def client_metrics(self) -> dict[str, dict[str, float]]:
        """Each client's metrics of the last evaluation with `evaluate_clients=True`."""
        return {} if self._running is None else self._running.client_metrics
