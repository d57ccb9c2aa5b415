"""`FederationRuntime`: what a federated trainer holds beyond a trainer, from construction to the last checkpoint.

The trainer's overrides stay thin: they decide which role they are in and ask the runtime. It is built once with the
trainer; `start` builds what runs the rounds around the model as it is then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainingArguments

from ..adapters import Exchange, freeze_layers
from ..clients import RowLimit
from ..clients.model_factory import check_given_models
from ..clients.participants import Participants
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..distillation import Distillation
from ..distributed.process_group import processes
from ..messages.ledger import Ledger
from ..postprocessing import Postprocessor
from ..server.callbacks import ServerState, call_event
from ..server.client_metrics import spread_over_clients
from ..server.round_loop import RoundLoop, RoundSummary
from .algorithms import algorithms_postprocessors, exchange_dtype, install_aggregation, install_distillation
from .builder import FederationBuilder
from .checkpoint import clients_directory, read_server_state, write_server_state
from .checks import (
    check_arguments,
    check_clients,
    check_participants,
    check_predictions,
    check_resumed,
    federation_identity,
    resolve_federation,
)
from .client_checkpoint import load_teachers, save_clients, save_teachers
from .launch_consistency import check_agreement, describe


class FederationRuntime:
    """
    One trainer's federation.

    Args:
        trainer (`transformers.Trainer`): Constructed already, without training data of its own.
        clients ([`FederatedDataset`]): Training rows by client.
        eval_clients ([`FederatedDataset`], *optional*): Evaluation rows by client.
        train_datasets (`Mapping[str, Dataset]`): The training rows as the trainer takes them.
        eval_datasets (`Mapping[str, Dataset]`, *optional*): The evaluation rows as the trainer takes them.
        config ([`FederatedConfig`], *optional*): As the user gave it.
        users_callbacks (`Sequence[TrainerCallback]`): As the user gave them; an [`AggregationCallback`] among them
            takes the place of `aggregation`.
        postprocessors (`Sequence[Postprocessor]`): Between a client's training and the aggregate.
        client_callbacks (`Sequence[TrainerCallback]`): Run inside clients.
        participants ([`Participants`]): Public rows, the server's, and how clients differ.
        arguments (`dict[str, Any]`): What the trainer's class was constructed with, by name.

    Raises:
        ValueError: If an argument or a combination is not supported.
    """

    def __init__(
        self,
        trainer: Trainer,
        clients: FederatedDataset,
        eval_clients: FederatedDataset | None,
        train_datasets: Mapping[str, Any],
        eval_datasets: Mapping[str, Any] | None,
        config: FederatedConfig | None,
        users_callbacks: Sequence[TrainerCallback],
        postprocessors: Sequence[Postprocessor],
        client_callbacks: Sequence[TrainerCallback],
        participants: Participants,
        arguments: dict[str, Any],
    ) -> None:
        self._trainer = trainer
        self._participants = participants
        self.clients = clients
        self.eval_clients = eval_clients
        self.config = resolve_federation(config, trainer.args)
        self.postprocessors = list(postprocessors)
        self.processes = processes()
        self.processes.meet(trainer.args.ddp_timeout)
        self.ledger = Ledger()
        self.client_metrics: dict[str, dict[str, float]] = {}
        self.summary = RoundSummary()
        self.examples_seen = 0
        self.decay_parameter_names: list[str] | None = None
        self._flos_per_token: int | None = None
        self._examples_per_step = 0
        # The model before the first round, where clients need it later.
        self._initial: dict[str, torch.Tensor] | None = None
        self._loop: RoundLoop | None = None
        self._distillation_callback = install_distillation(trainer, users_callbacks, self.config)
        self.aggregation = install_aggregation(trainer, users_callbacks, self.config, self.distillation)
        self.postprocessors += algorithms_postprocessors(self.aggregation, self.config)
        if self.aggregation.trains_private_models and self.is_spread and not self.spreads_clients:
            raise ValueError(
                f"aggregation={self.aggregation.name!r} trains a private model of each client, which the processes of "
                "parallelism='data' cannot train together: set parallelism='clients'."
            )
        check_arguments(trainer, self.config, self.aggregation)
        check_participants(self.aggregation, self.distillation, participants, clients, postprocessors)
        check_given_models(participants, trainer.model)
        are_raw = participants.task is not None
        self._sampler = check_clients(trainer, clients, eval_clients, self.config, are_raw, self.distillation)
        self._builder = FederationBuilder(
            trainer=trainer,
            arguments=arguments,
            config=self.config,
            clients=clients,
            train_datasets=train_datasets,
            eval_datasets=eval_datasets,
            participants=participants,
            aggregation=self.aggregation,
            distillation=self.distillation,
            postprocessors=self.postprocessors,
            client_callbacks=client_callbacks,
            processes=self.processes,
            spreads_clients=self.spreads_clients,
        )
        self.freeze(trainer.model)
        if self.distillation is not None:
            check_predictions(self.distillation, participants, trainer)
            self.distillation.check_model(trainer.model)
        # A wrong `exchange` should fail now and not in the first round.
        self.exchange = Exchange(trainer.model, self.config.exchange)
        # Nor may processes of different `parallelism` wait for one another in different places.
        self._check_agreement("construction of the trainer", trainer.args, None)

    @property
    def distillation(self) -> Distillation | None:
        """The distillation algorithm, if there is one."""
        return None if self._distillation_callback is None else self._distillation_callback.algorithm

    @property
    def public_dataset(self) -> Dataset | None:
        """The public rows as the user gave them."""
        return self._participants.public_dataset

    def _check_agreement(self, place: str, args: TrainingArguments, checkpoint: str | None) -> None:
        """Raise in all processes if they are about to do different things."""
        if self.is_spread:
            clients = {"clients": self.clients}
            if self.eval_clients is not None:
                clients["evaluation clients"] = self.eval_clients
            for argument in ("public_dataset", "server_dataset"):
                if (rows := getattr(self._participants, argument)) is not None:
                    clients[f"`{argument}`"] = FederatedDataset.from_dict({argument: rows})
            name = None if checkpoint is None else Path(checkpoint).name
            description = describe(
                args,
                self.config,
                self.aggregation,
                self.distillation,
                self._trainer.model,
                clients,
                self.postprocessors,
                name,
            )
            check_agreement(self.processes, place, description, clients)

    @property
    def is_spread(self) -> bool:
        """Whether several processes share the work."""
        return self.processes.world_size > 1

    @property
    def spreads_clients(self) -> bool:
        """Whether each process trains whole clients, and knows nothing of the others meanwhile."""
        return self.is_spread and self.config.parallelism == "clients"

    def alone(self, as_main: bool = False) -> AbstractContextManager[None]:
        """With `parallelism="clients"` this process is the only one as far as the parent trainer can see."""
        return self.processes.independent(as_main) if self.spreads_clients else nullcontext()

    @property
    def num_rounds(self) -> int:
        """Rounds of the run."""
        assert self.config.num_rounds is not None
        return self.config.num_rounds

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one it goes on from."""
        return federation_identity(
            self.config, self.aggregation, self.distillation, self.clients, self._participants, self._trainer.args
        )

    def freeze(self, model: nn.Module) -> None:
        """Freeze what the configuration says."""
        if self.config.freeze is not None:
            freeze_layers(model, self.config.freeze)

    def start(self, args: TrainingArguments, checkpoint: str | None) -> None:
        """
        Build what runs the rounds around the trainer's model as it is now.

        Args:
            args (`TrainingArguments`): The user's.
            checkpoint (`str`, *optional*): The checkpoint to go on from. Of an adapter the weights come from it too.
        """
        self._check_agreement("start of the rounds", args, checkpoint)
        config, model = self.config, self._trainer.model
        if self.spreads_clients:
            # As DistributedDataParallel does: a head or an adapter may have been drawn without a seed.
            self.processes.broadcast_([*model.parameters(), *model.buffers()], source=0)
        exchange = Exchange(model, config.exchange)
        saved = {} if checkpoint is None else read_server_state(checkpoint)
        if checkpoint is not None:
            check_resumed(saved["identity"], self.identity, checkpoint)
        builder = self._builder
        self._initial = (saved.get("initial") or exchange.read()) if builder.needs_initial else None
        student = builder.build_student(args)
        row_limit = RowLimit(self.clients.num_rows, config.balance, config.max_rows_per_round)
        engine = builder.build_engine(args, exchange, student, self._initial, row_limit)
        engine.reset()
        self.aggregation.setup(self.num_rounds, len(self.clients))
        if self._distillation_callback is not None and student is not None:
            server = builder.build_distillation_server(student, exchange, self.num_rounds, self._sampler.num_sampled)
            teachers = builder.build_teachers(args, student, exchange)
            self._distillation_callback.start(server, teachers, self.processes.from_main)
        self.examples_seen = 0
        # What every client's trainer would find out for itself.
        self.decay_parameter_names, self._flos_per_token = None, None
        self._trainer._set_signature_columns_if_needed()
        self._examples_per_step = self._trainer.get_total_train_batch_size(args)
        if checkpoint is not None:
            directory = clients_directory(checkpoint)
            self.aggregation.load_state_dict(saved["aggregation"])
            if self._distillation_callback is not None:
                self._distillation_callback.load_state_dict(saved["distillation"])
                teachers = self._distillation_callback.teachers
                load_teachers(directory, saved["teachers"], teachers, self.processes, self.spreads_clients)
            engine.ledger = Ledger.from_dict(saved["ledger"])
            engine.load(directory, saved["clients"])
            if "weights" in saved:
                exchange.write(saved["weights"])
        self.ledger = engine.ledger
        self.exchange = exchange
        self._loop = RoundLoop(
            engine=engine,
            server=ServerState(exchange.read(), num_rounds=self.num_rounds, client_ids=tuple(self.clients)),
            sampler=self._sampler,
            seed=config.federation_seed or 0,
            min_clients=config.min_clients,
            postprocessors=self.postprocessors,
            fire=self.fire,
            write=exchange.write,
            sent_dtype=exchange_dtype(config),
            sends_state=builder.sends_state,
            returns_state=self.aggregation.exchanges_parameters,
            row_limit=row_limit,
        )

    @property
    def loop(self) -> RoundLoop:
        """What runs the rounds; built by `start`."""
        assert self._loop is not None, "the federation has not started"
        return self._loop

    def fire(self, event: str, **kwargs: Any) -> None:
        """Tell the trainer's callbacks of an event of the round."""
        trainer = self._trainer
        trainer.control = call_event(
            trainer.callback_handler.callbacks,
            event,
            trainer.args,
            trainer.state,
            trainer.control,
            server=self.loop.server,
            model=trainer.model,
            **kwargs,
        )

    def run_round(self, round: int) -> RoundSummary:
        """Run a round, from 0."""
        self.summary = self.loop.run(round)
        if self.config.local_steps is None:
            self.examples_seen += self.summary.num_examples * self.config.local_epochs
        else:
            # As `Trainer` counts for `max_steps`: full batches.
            num_steps = sum(int(row["num_steps"]) for row in self.summary.clients.values())
            self.examples_seen += num_steps * self._examples_per_step
        return self.summary

    def share_decisions(self, control: TrainerControl) -> None:
        """Let all processes log, evaluate, save or stop if a callback in one of them decided so."""
        for decided in self.processes.gather(f"end of round {self.loop.server.round}", vars(control)):
            for name, is_set in decided.items():
                setattr(control, name, getattr(control, name) or is_set)

    def flos_per_token(self) -> int:
        """Floating point operations of a step, as `Trainer` counts them, for each input token."""
        if self._flos_per_token is None:
            one_token = {self._trainer.model.main_input_name: torch.empty(1)}
            self._flos_per_token = Trainer.floating_point_ops(self._trainer, one_token)
        return self._flos_per_token

    def round_logs(self) -> dict[str, float]:
        """What the log of a round has that the parent's could not."""
        summary = self.summary
        logs: dict[str, float] = dict(summary.further)
        if summary.grad_norm is not None:
            logs["grad_norm"] = summary.grad_norm
        logs["federated/num_clients"] = summary.num_clients
        logs["federated/num_failed"] = summary.num_failed
        logs["federated/bytes_up"] = self.ledger.bytes_up
        logs["federated/bytes_down"] = self.ledger.bytes_down
        if self._distillation_callback is not None:
            logs.update({f"federated/{name}": value for name, value in self._distillation_callback.logs.items()})
        if self.config.log_clients:
            for client_id, row in summary.clients.items():
                logs.update({f"client/{client_id}/{name}": value for name, value in row.items()})
        return logs

    def evaluate_clients(self, args: TrainingArguments) -> dict[str, float]:
        """
        Evaluate the trainer's model, as it is now, on each client's own rows.

        Returns:
            `dict[str, float]`: What [`spread_over_clients`] makes of it; each client's own is in `client_metrics`.
        """
        assert self.eval_clients is not None
        if self._loop is None:
            self.start(args, None)
        self.loop.server.weights = self.exchange.read()
        self.client_metrics = self.loop.evaluate(list(self.eval_clients))
        return spread_over_clients(self.client_metrics, args.metric_for_best_model, args.greater_is_better)

    def save(self, checkpoint: Path) -> None:
        """
        Write the federation's state into a checkpoint that is being made: every process what its clients keep, the
        main process the server's. The main process has made the directory for clients.
        """
        directory, callback = clients_directory(checkpoint), self._distillation_callback
        place = f"{checkpoint.name}: the clients' files"
        digests = save_clients(directory, self.loop.engine, self.processes, place)
        sent = save_teachers(
            directory, None if callback is None else callback.teachers, self.processes, self.spreads_clients
        )
        if not self.processes.is_main:
            return
        state = {
            "identity": self.identity,
            "aggregation": self.aggregation.state_dict(),
            "ledger": self.ledger.to_dict(),
            "clients": digests,
            "teachers": sent,
        }
        if callback is not None:
            state["distillation"] = callback.state_dict()
        if self._initial is not None:
            # Clients that were never asked so far start from it.
            state["initial"] = self._initial
        if isinstance(self._trainer.model, PeftModel):
            state["weights"] = self.loop.server.weights
        write_server_state(checkpoint, state)

    def load_weights(self, checkpoint: str) -> None:
        """Put an adapter's exchanged values from a checkpoint into the model."""
        self.exchange.write(read_server_state(checkpoint)["weights"])
