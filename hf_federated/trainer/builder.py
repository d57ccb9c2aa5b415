"""`FederationBuilder`: what a federation's rounds run on, built around the trainer's model as it is at their start.

That is an engine with the worker that plays the clients, and for a distillation the server's side of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..adapters import Exchange
from ..aggregation import Aggregation
from ..clients import (
    ClientModels,
    ClientStore,
    ClientWorker,
    DiskStore,
    MemoryStore,
    OwnModels,
    RowLimit,
    SharedModel,
    Student,
    batches_per_round,
)
from ..clients.model_factory import ClientModelBuilder
from ..clients.participants import Participants
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distillation import Distillation, DistillationServer, Teachers
from ..distributed.process_group import Processes
from ..engines import Engine, LocalEngine, RankEngine, WatchPeers
from ..postprocessing import Postprocessor
from .checks import check_labelled
from .client_checkpoint import TEACHERS_DIR


CLIENT_STORE_DIR = "client_store"


@dataclass(kw_only=True)
class FederationBuilder:
    """
    Builds what the rounds of one trainer run on.

    Args:
        trainer (`transformers.Trainer`): The federated trainer.
        arguments (`dict[str, Any]`): What its class was constructed with, by name.
        config ([`FederatedConfig`]): With nothing left open.
        clients ([`FederatedDataset`]): Training rows by client.
        train_datasets (`Mapping[str, Dataset]`): The training rows as the trainer takes them.
        eval_datasets (`Mapping[str, Dataset]`, *optional*): The evaluation rows as the trainer takes them.
        participants ([`Participants`]): Public rows, the server's, and how clients differ.
        aggregation ([`Aggregation`]): The algorithm that averages.
        distillation ([`Distillation`], *optional*): The algorithm that distils.
        postprocessors (`Sequence[Postprocessor]`): Between a client's training and the aggregate.
        client_callbacks (`Sequence[TrainerCallback]`): Run inside clients.
        processes ([`Processes`]): That share the work.
        spreads_clients (`bool`): Whether each of several processes trains whole clients.
    """

    trainer: Trainer
    arguments: dict[str, Any]
    config: FederatedConfig
    clients: FederatedDataset
    train_datasets: Mapping[str, Any]
    eval_datasets: Mapping[str, Any] | None
    participants: Participants
    aggregation: Aggregation
    distillation: Distillation | None
    postprocessors: Sequence[Postprocessor]
    client_callbacks: Sequence[TrainerCallback]
    processes: Processes
    spreads_clients: bool

    @property
    def needs_initial(self) -> bool:
        """
        Whether clients need the model as it was before the first round, whenever they are first asked: those with
        models of their own, which may begin as copies of it, and those that compute features with it.
        """
        has_other_models = not self.aggregation.exchanges_parameters or self.aggregation.trains_private_models
        return has_other_models or (self.distillation is not None and self.distillation.needs_features)

    @property
    def sends_state(self) -> bool:
        """Whether the global state goes to the clients."""
        distils_parameters = self.distillation is not None and self.distillation.sends_parameters
        return self.aggregation.exchanges_parameters or distils_parameters

    def build_engine(
        self,
        args: TrainingArguments,
        exchange: Exchange,
        student: Student | None,
        initial: dict[str, torch.Tensor] | None,
        row_limit: RowLimit,
    ) -> Engine:
        """
        Where the clients run.

        Args:
            args (`TrainingArguments`): The user's.
            exchange ([`Exchange`]): Reads and writes the trainer's model.
            student ([`~hf_federated.clients.Student`], *optional*): The trainer's model over the public rows.
            initial (`dict[str, torch.Tensor]`, *optional*): What is exchanged, as it was before the first round, if
                `needs_initial`.
            row_limit ([`RowLimit`]): How many rows clients train on at most.
        """
        config, is_spread = self.config, self.processes.world_size > 1
        store: ClientStore = MemoryStore()
        if config.client_store == "disk":
            store = self._disk_store(args, CLIENT_STORE_DIR)
        worker = ClientWorker(
            models=self._client_models(args, exchange, store, student, initial),
            train_datasets=self.train_datasets,
            eval_datasets=self.eval_datasets,
            algorithm=self.aggregation,
            config=config,
            distillation=self.distillation,
            private_models=self._model_builder(args, initial) if self.aggregation.trains_private_models else None,
            postprocessors=self.postprocessors,
            callbacks=[*self.client_callbacks, *([WatchPeers(self.processes)] if is_spread else [])],
        )
        if not is_spread:
            return LocalEngine(worker)
        # Balanced clients of a cohort all cost the same, whatever its smallest has.
        max_rows = row_limit(list(self.clients))
        costs = batches_per_round(self.clients.num_rows, config.local_epochs, config.local_steps, args, max_rows)
        return RankEngine(worker, self.processes, config.parallelism, costs)

    def build_student(self, args: TrainingArguments) -> Student | None:
        """The trainer's model over the public rows, where there are any; `None` where nothing is distilled."""
        if self.distillation is None:
            return None
        trainer = self.trainer.outside_rounds(args)
        learning_rate = self.distillation.server_learning_rate
        if self.participants.public_dataset is None:
            return Student(trainer, None, learning_rate)
        return self.participants.encode_public(trainer.processing_class).student(trainer, learning_rate)

    def build_distillation_server(
        self, student: Student, exchange: Exchange, num_rounds: int, num_sampled: int
    ) -> DistillationServer:
        """
        The server's side of the distillation.

        Args:
            student ([`~hf_federated.clients.Student`]): From `build_student`.
            exchange ([`Exchange`]): Reads and writes its model.
            num_rounds (`int`): Rounds of the run.
            num_sampled (`int`): Clients that are asked in a round.

        Raises:
            ValueError: If the server's labelled rows have no labels.
        """
        labelled = self.participants.server_dataset
        if labelled is not None:
            labelled = student.select_columns(self.participants.encode(labelled, self.trainer.processing_class))
            check_labelled(labelled)
        seed = self.config.federation_seed or 0
        return DistillationServer(student, seed, num_rounds, exchange, len(self.clients), num_sampled, labelled)

    def build_teachers(self, args: TrainingArguments, student: Student, exchange: Exchange) -> Teachers | None:
        """Where the server puts what clients send until it has distilled, empty, for a method that needs it."""
        if self.distillation is None or not self.distillation.needs_teachers:
            return None
        gather = self.processes.gather if self.spreads_clients else None
        teachers = Teachers(student.model, exchange.kind, self._disk_store(args, TEACHERS_DIR), gather)
        teachers.forget()
        return teachers

    def _disk_store(self, args: TrainingArguments, folder: str) -> DiskStore:
        """A store of this process's own."""
        own = folder if self.processes.is_main else f"{folder}-{self.processes.rank}"
        return DiskStore(Path(args.output_dir) / own)

    def _client_models(
        self,
        args: TrainingArguments,
        exchange: Exchange,
        store: ClientStore,
        student: Student | None,
        initial: dict[str, torch.Tensor] | None,
    ) -> ClientModels:
        if self.aggregation.exchanges_parameters:
            return SharedModel(self.trainer, exchange, args, store, student, initial)
        return OwnModels(self._model_builder(args, initial), store, self.config.max_resident_clients)

    def _model_builder(self, args: TrainingArguments, initial: dict[str, torch.Tensor] | None) -> ClientModelBuilder:
        assert initial is not None, "needs_initial says when clients have models of their own"
        algorithm, config = self.distillation, self.config
        return ClientModelBuilder(
            self.trainer,
            {**self.arguments, "args": args},
            self.participants,
            initial,
            seed=config.federation_seed or 0,
            exchange=config.exchange,
            freeze=config.freeze,
            learning_rate=None if algorithm is None else algorithm.client_learning_rate,
        )
