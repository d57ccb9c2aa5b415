"""`Workers`: what trains in a federation, built from the arguments of the trainer."""

from __future__ import annotations

import dataclasses
from collections import ChainMap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ..adapters import Exchange
from ..clients import (
    Agreement,
    ClientModels,
    ClientWorker,
    DiskStore,
    MemoryStore,
    OwnModels,
    RowLimit,
    SharedModel,
    Student,
    batches_per_round,
)
from ..clients.journal import ClientJournal
from ..clients.model_factory import ClientModelBuilder
from ..clients.secure_answers import SecureAnswers
from ..engines import ClientEngine, EngineContext, WatchPeers
from ..messages import ClientUpdate, Fit, kinds_of
from ..messages.secure_aggregation import SECURE_MESSAGES
from ..messages.serialization import MAX_TENSORS
from ..secure_aggregation.credentials import Credentials, simulated_identity, simulated_key
from ..server import RoundProgress
from ..utils.weighted_mean import State
from .checkpoint import clients_directory
from .setup import FederationSetup, shards_of


CLIENT_STORE_DIR = "client_store"
# The encoded updates of clients until they are in a sum.
SECURE_UPDATES_DIR = "secure_updates"
# Number of tensors of a message for each exchanged tensor, such as control variates and the parts of a codec, and of
# other tensors.
_TENSORS_PER_TENSOR = 4
_OTHER_TENSORS = 1000
# Number of tensors for each client in the keys of secure aggregation: the keys, a certificate and a signature.
_KEY_TENSORS = 3


class Workers:
    """
    Builds the worker of the clients, the worker of the server, and their models.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        args (`TrainingArguments`): The user's training arguments.
        exchange ([`Exchange`]): Reads and writes the exchanged parameters of the trainer's model.
        initial (`dict[str, torch.Tensor]`, *optional*): The exchanged parameters before the first round, if clients
            need them later.
        progress ([`~hf_federated.server.RoundProgress`]): Shows how far a round is.

    Attributes:
        student ([`Student`], *optional*): The student of a distillation.
    """

    def __init__(
        self,
        setup: FederationSetup,
        args: TrainingArguments,
        exchange: Exchange,
        initial: State | None,
        progress: RoundProgress,
    ) -> None:
        self._setup, self._args, self._trainer = setup, args, setup.trainer
        self._exchange, self._initial, self._progress = exchange, initial, progress
        self._watch_peers = [WatchPeers(setup.processes)] if setup.is_spread else []
        self.student = self._build_student()
        # The state of the training on the server's own examples. The checkpoint of the server has it.
        self.server_store = MemoryStore()

    def engine_context(self, row_limit: RowLimit) -> EngineContext:
        """
        Return the federation as an engine runs it.

        Args:
            row_limit ([`RowLimit`]): Maximum number of examples of a client in a round.
        """
        setup, config = self._setup, self._setup.config
        # With `balance` all clients of a cohort have the same cost.
        max_rows = row_limit(list(setup.clients))
        costs = batches_per_round(
            setup.clients.num_rows, config.local_epochs, config.local_steps, self._args, max_rows
        )
        output_dir = Path(self._args.output_dir)
        secure = SECURE_MESSAGES if setup.secure_aggregation is not None else ()
        kinds = kinds_of(*(kind for method in setup.methods for kind in method.messages), *secure)
        return EngineContext(
            self._build_worker,
            costs,
            config.parallelism,
            setup.processes,
            lambda: [clients_directory(path, setup.files) for path in sorted(output_dir.glob("checkpoint-*"))],
            kinds,
            # A message has a state, and tensors that a method adds for each tensor of the state.
            max_tensors=_TENSORS_PER_TENSOR * len(self._exchange.names) + _OTHER_TENSORS + self._num_key_tensors(),
            keeps_ranks=any(step.keeps_server_memory for step in setup.postprocessors),
            is_sharded=setup.is_sharded,
        )

    def _build_worker(self) -> ClientWorker:
        setup = self._setup
        return ClientWorker(
            models=self._build_client_models(),
            train_datasets=setup.train_datasets,
            eval_datasets=setup.eval_datasets,
            methods=setup.methods,
            config=setup.config,
            private_models=self._model_builder() if setup.aggregation.trains_private_models else None,
            postprocessors=setup.postprocessors,
            callbacks=[*setup.client_callbacks, *self._watch_peers, *self._progress.client_callbacks()],
            agreement=self.agreement(),
            secure=self._secure_answers(),
            peft_configs=setup.participants.peft_configs,
            # The messages between processes of one launch have shards.
            shards=shards_of(self._exchange, setup.processes) if isinstance(setup.engine, ClientEngine) else None,
        )

    def agreement(self) -> Agreement:
        """Return what the requests of a server may contain, from the arguments of this trainer."""
        setup, config = self._setup, self._setup.config
        limits_rows = config.balance is not None or config.max_rows_per_round is not None
        # A balanced client does not know the sizes of the others.
        smallest_limit = (config.max_rows_per_round if config.balance is None else None) or 1
        known: list[Any] = [clients for clients in (setup.clients, setup.eval_clients) if clients is not None]
        return Agreement(
            [method.on_client() for method in setup.methods],
            config.num_rounds or 1,
            sends_state=setup.sends_parameters,
            returns_state=setup.aggregation.exchanges_parameters,
            smallest_limit=smallest_limit if limits_rows else None,
            num_public_rows=0 if self.student is None else self.student.num_rows,
            seed=setup.seed,
            # A copy of all ids would be read by the garbage collection after each local training.
            client_ids=ChainMap(*known),
            secure=setup.secure_aggregation,
        )

    def _num_key_tensors(self) -> int:
        """Return the number of tensors of the keys of all clients under secure aggregation."""
        setup = self._setup
        if setup.secure_aggregation is None:
            return 0
        known = setup.clients if setup.credentials is None else setup.credentials.fingerprints
        # A client that accepts any certificate does not know the number of clients.
        return MAX_TENSORS if known is None else _KEY_TENSORS * (len(known) + 1)

    def _secure_answers(self) -> SecureAnswers | None:
        """Return what answers the requests of secure aggregation. All clients of this process share an identity."""
        protocol = self._setup.secure_aggregation
        if protocol is None:
            return None
        aggregation: Any = self._setup.aggregation.on_client()
        aggregation.max_weight = protocol.largest_weight
        credentials = self._setup.credentials
        if credentials is None:
            # The processes of a launch train different clients, which verify each other.
            identity = simulated_identity(self._setup.processes.run_on_main("simulated clients", simulated_key))
            pins = dict.fromkeys(self._setup.clients, identity.fingerprint)
            credentials = Credentials(identity, pins)
        on_disk = self._setup.config.client_store == "disk"
        store = self.disk_store(SECURE_UPDATES_DIR) if on_disk else None
        if store is not None:
            store.clear()
        return SecureAnswers(protocol, aggregation, credentials, ClientJournal(), store)

    def _build_client_models(self) -> ClientModels:
        setup = self._setup
        store = self.disk_store(CLIENT_STORE_DIR) if setup.config.client_store == "disk" else MemoryStore()
        if setup.aggregation.exchanges_parameters:
            return SharedModel(self._trainer, self._exchange, self._args, store, self.student, self._initial)
        return OwnModels(self._model_builder(), store, setup.config.max_resident_clients)

    def _model_builder(self) -> ClientModelBuilder:
        setup, distillation = self._setup, self._setup.distillation
        return ClientModelBuilder(
            self._trainer,
            {**setup.arguments, "args": self._args},
            setup.participants,
            self._initial or self._exchange.read(),
            seed=setup.seed,
            exchange=setup.config.exchange,
            freeze=setup.config.freeze,
            learning_rate=None if distillation is None else distillation.client_lr,
            same_vocabulary=distillation is None or not distillation.alignment.supports_other_vocabularies,
        )

    def disk_store(self, folder: str) -> DiskStore:
        """Build a store that only this process uses."""
        processes = self._setup.processes
        return DiskStore(Path(self._args.output_dir) / (folder if processes.is_main else f"{folder}-{processes.rank}"))

    def _build_student(self) -> Student | None:
        """Build the student of a distillation: the trainer's model and the public examples."""
        distillation, participants = self._setup.distillation, self._setup.participants
        if distillation is None:
            return None
        trainer = self._trainer.as_plain_trainer(self._args)
        learning_rate = distillation.server_lr
        if participants.public_dataset is None:
            return Student(trainer, None, learning_rate)
        return participants.encode_public(trainer.processing_class).student(trainer, learning_rate)

    def server_training(self, device: torch.device | None) -> Callable[[Fit], ClientUpdate]:
        """
        Return the function that trains the global model on the server's own examples.

        Args:
            device (`torch.device`, *optional*): Device of the result.
        """
        setup = self._setup
        worker = ClientWorker(
            models=SharedModel(self._trainer, self._exchange, self._args, self.server_store),
            train_datasets=setup.server_datasets,
            eval_datasets=None,
            # A distillation asks clients only.
            methods=(setup.aggregation,),
            # Only clients carry their optimizers.
            config=dataclasses.replace(setup.config, client_optimizer_state="reset"),
            callbacks=self._watch_peers,
            is_federation=True,
        )

        def train(message: Fit) -> ClientUpdate:
            with setup.independent(as_main=True):
                reply = worker.handle(message)
            if not isinstance(reply, ClientUpdate):
                raise RuntimeError(
                    f"Round {message.round + 1}: the server could not train on `server_dataset`: {worker.last_error}"
                ) from worker.last_error
            reply = reply.to(device)
            if setup.spreads_clients:
                # Accelerators may compute slightly different values.
                setup.processes.wait(f"training of the server, round {message.round}")
                setup.processes.broadcast_(list(reply.state.values()), source=0)
            return reply

        return train
