"""`Federation`: a running federation of one trainer, from the start of the rounds to the last checkpoint.

The method overrides of the trainer only choose between roles. The work of the federated role is done here.
"""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import Trainer, TrainerControl, TrainingArguments

from .._compat import set_signature_columns, train_tokens
from ..adapters import Exchange
from ..adapters.shards import free_unsharded
from ..clients import RowLimit
from ..clients.store import client_file_name
from ..distillation import DistillationServer, Teachers
from ..messages.ledger import Ledger
from ..postprocessing import exchange_dtype
from ..server import (
    CollectorContext,
    FederatedCallback,
    FitSettings,
    RoundLoop,
    RoundProgress,
    RoundSummary,
    ServerState,
    StepMemories,
    call_event,
    spread_over_clients,
)
from ..server.bound_update import BoundUpdate
from ..server.round_loop import SERVER_NAME
from ..utils.shards import states_in_shards
from ..utils.weighted_mean import State
from .announcement import announce
from .announcement_limits import AnnouncementLimits
from .checkpoint import (
    clients_directory,
    list_checkpoints,
    num_finished_rounds,
    read_server_state,
    step_of,
    write_server_state,
)
from .checks.data import check_labeled
from .checks.resume import check_resumed, federation_identity
from .claim_limits import ClaimLimits
from .client_checkpoint import STEPS_DIR, TEACHERS_DIR, save_clients, save_folder
from .launch_consistency import check_consistency
from .network_settings import NetworkSettings
from .round_learning_rate import relative_learning_rate
from .setup import FederationSetup, shards_of
from .workers import Workers


# Number of clients whose limits are in memory.
NUM_CACHED_LIMITS = 256


class Federation:
    """
    A running federation. It starts from the parameters that the trainer's model has when the rounds start.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        args (`TrainingArguments`): The user's training arguments.
        checkpoint (`str`, *optional*): The checkpoint to resume from.

    Raises:
        ValueError: If the checkpoint belongs to another federation.
    """

    def __init__(self, setup: FederationSetup, args: TrainingArguments, checkpoint: str | None) -> None:
        check_consistency(setup, "start of the rounds", args, checkpoint)
        self._setup, self._args, self._trainer = setup, args, setup.trainer
        model = self._trainer.model
        if setup.spreads_clients:
            # A process may have initialized a head or an adapter without a seed. DistributedDataParallel also starts
            # from the parameters of the main process.
            setup.processes.broadcast_([*model.parameters(), *model.buffers()], source=0)
        self.engine = setup.engine
        saved = {} if checkpoint is None else read_server_state(checkpoint, setup.files)
        if setup.is_sharded:
            # After an evaluation, some modules have whole parameters in place of shards.
            free_unsharded(model)
        changes_base = setup.aggregation.changes_base
        self.exchange = Exchange(model, setup.config.exchange, setup.config.keep_local, changes_base)
        self._shards = shards_of(self.exchange, setup.processes)
        if self._shards is not None:
            setup.exchange.follow(self.exchange)
        # The exchanged parameters before the first round, if clients need them when they first train: clients with
        # their own models may start from a copy, and some distillation algorithms compute features with them.
        has_other_models = not setup.aggregation.exchanges_parameters or setup.aggregation.trains_private_models
        computes_features = setup.distillation is not None and setup.distillation.requirements.initial_model
        needs_initial = has_other_models or computes_features
        self.initial = (saved.get("initial") or self.exchange.read()) if needs_initial else None
        self._announcements = AnnouncementLimits(setup)
        self._announcements.load_state_dict(saved.get("announcements", {}))
        self.engine.find_refused = self._announcements.refused
        is_complete = checkpoint is not None and num_finished_rounds(checkpoint) >= setup.num_rounds
        self.engine.connect(
            lambda: NetworkSettings.of(setup, args, initial=self.initial),
            Path(str(args.output_dir)),
            setup.num_rounds,
            is_complete=is_complete,
        )
        if checkpoint is not None:
            check_resumed(saved["identity"], federation_identity(setup, args), checkpoint, setup.clients.is_remote)
        if not is_complete:
            self._announcements.start(self.engine.announcements)
        self._client_ids = tuple(setup.clients)
        self._num_examples = setup.clients.num_rows
        self._row_limit = RowLimit(self._num_examples, setup.config.balance, setup.config.max_rows_per_round)
        self._progress = RoundProgress(lambda: self._trainer.callback_handler.callbacks, setup.num_rounds)
        device = setup.config.server_device
        self._device = None if device is None else torch.device(device)
        self._workers = Workers(setup, args, self.exchange, self.initial, self._progress)
        self.engine.start(self._workers.engine_context(self._row_limit))
        setup.aggregation.setup(setup.num_rounds, len(setup.clients))
        max_ratio = setup.config.max_update_ratio
        self._bound = BoundUpdate(
            math.inf if max_ratio is None else max_ratio,
            sends_changes=setup.aggregation.update_content == "changes",
            amount_of_training=setup.aggregation.amount_of_training,
            relative_learning_rate=relative_learning_rate(args, setup.num_rounds, setup.config.lr_schedule),
        )
        uses_disk = setup.config.client_store == "disk"
        self._steps = StepMemories(setup.postprocessors, self._workers.disk_store(STEPS_DIR) if uses_disk else None)
        self._steps.store.clear()
        # The keyword `server` of the events of a round.
        self._server_view: tuple[Any, ServerState] | None = None
        self.teachers = self._start_distillation()
        self.summary = RoundSummary()
        self.examples_seen = 0
        self.client_metrics: dict[str, dict[str, float]] = {}
        self.decay_parameter_names: list[str] | None = None
        # By the number of values of the residual adapter.
        self._flos_per_token: dict[int, int] = {}
        # The trainers of the clients are copies and use these columns.
        set_signature_columns(self._trainer)
        if checkpoint is not None:
            self._load(clients_directory(checkpoint, setup.files), saved)
        self.loop = self._build_loop()
        if saved.get("collector"):
            setup.collector.load_state_dict(saved["collector"])

    # ---- Construction

    def _start_distillation(self) -> Teachers | None:
        """Start the distillation. Return the store of the clients' models if the method needs one."""
        setup, distillation, student = self._setup, self._setup.distillation, self._workers.student
        if distillation is None or student is None:
            return None
        labeled = setup.participants.server_dataset
        if labeled is not None:
            labeled = student.select_columns(setup.participants.encode(labeled, self._trainer.processing_class))
            check_labeled(labeled)

        teachers: Teachers | None = None
        if distillation.needs_teachers:
            gather = setup.processes.gather if setup.spreads_clients else None
            teachers = Teachers(student.model, setup.config.exchange, self._workers.disk_store(TEACHERS_DIR), gather)
            teachers.clear()
        server = DistillationServer(
            student,
            setup.seed,
            setup.num_rounds,
            self.exchange,
            len(setup.clients),
            setup.sampler.num_sampled,
            labeled,
            teachers,
            self._device,
        )
        distillation.start(server, setup.processes.run_on_main)
        return teachers

    def _load(self, directory: Path, saved: dict[str, Any]) -> None:
        setup = self._setup
        setup.aggregation.load_state_dict(saved["aggregation"])
        # A checkpoint of version 0.1.0 has no bound.
        self._bound.load_state_dict(saved.get("bound", {}))
        if setup.distillation is not None:
            setup.distillation.load_state_dict(saved["distillation"]["algorithm"])
            setup.distillation.server.student.load_state_dict(saved["distillation"]["student"])
        # If the processes train different clients, the main process holds all models until the clients send new ones.
        if self.teachers is not None and (setup.processes.is_main or not setup.spreads_clients):
            self.teachers.load(directory / TEACHERS_DIR, saved["teachers"])
        self.engine.ledger = Ledger.from_state_dict(saved["ledger"])
        self.engine.load(directory, saved["clients"])
        step_digests = saved.get("steps", {})
        # Each process keeps the entries of the clients that it trains.
        own = self.engine.own_clients(list(step_digests)) if step_digests else ()
        self._steps.store.load(directory / STEPS_DIR, {client_id: step_digests[client_id] for client_id in own})
        self._steps.load_state_dict(saved.get("sums_of_steps", {}))
        self._workers.server_store.set(SERVER_NAME, saved.get("server_training", {}))
        # An adapter's local tensors are in no file of the parent's checkpoint.
        self.exchange.load_initial_local(saved.get("local", {}))
        if "weights" in saved:
            self.exchange.write(saved["weights"])

    @property
    def _shares_state(self) -> bool:
        """Whether the global state and the model share memory, because no training changes the model."""
        setup = self._setup
        trains_here = self.engine.trains_here or setup.aggregation.trains_on_server or setup.distillation is not None
        return not trains_here and self._device is None

    def _read_state(self) -> State:
        """Return the exchanged parameters of the model, as a copy unless the model shares its memory."""
        return self.exchange.tensors if self._shares_state else self.exchange.read(self._device)

    def _build_loop(self) -> RoundLoop:
        setup, config = self._setup, self._setup.config
        limits = ClaimLimits(setup, self._args, self._num_examples)
        context = CollectorContext(
            engine=self.engine,
            fit=FitSettings(
                methods=setup.methods,
                seed=setup.seed,
                steps=self._steps,
                dtype=exchange_dtype(config.exchange_dtype),
                sends_state=setup.sends_parameters,
                returns_state=setup.aggregation.exchanges_parameters,
                row_limit=self._row_limit,
                # Only the announcement of a client on another machine can change the limits.
                limits=limits if setup.clients.is_remote else functools.lru_cache(NUM_CACHED_LIMITS)(limits),
                device=self._device,
                norm_of=self._bound.norm_of,
            ),
            progress=self._progress,
            bound=self._bound,
            deadline=config.round_deadline,
            fire=self._fire,
            on_dispatch=lambda client_id: self._fire("on_client_begin", client_id=client_id),
            output_dir=Path(str(self._args.output_dir)),
            first_needed=self._first_needed,
        )
        setup.collector.start(context)
        return RoundLoop(
            context=context,
            collector=setup.collector,
            sampler=setup.sampler,
            config=config,
            state=self._read_state(),
            write=self.exchange.share if self._shares_state else self.exchange.write,
            train_on_server=self._workers.server_training(self._device)
            if setup.aggregation.trains_on_server
            else None,
        )

    def _first_needed(self) -> int:
        """Return the first round that a run can repeat if it resumes from one of the checkpoints."""
        checkpoints = list_checkpoints(str(self._args.output_dir))
        return step_of(checkpoints[0]) if checkpoints else 0

    # ---- Rounds

    def announce(self, round: int) -> None:
        """
        Log the lines that announce the training.

        Args:
            round (`int`): The next round, from 0.
        """
        announce(self._setup, self._args, round, self._row_limit)

    def _fire(self, event: str, **kwargs: Any) -> None:
        """Call an event of the round on the trainer's callbacks."""
        trainer = self._trainer
        callbacks = [each for each in trainer.callback_handler.callbacks if isinstance(each, FederatedCallback)]
        if not callbacks:
            return
        round = self.loop.round
        if self._server_view is None or self._server_view[0] is not round:
            fixed = {"num_rounds": self._setup.num_rounds, "client_ids": self._client_ids, "device": self._device}
            self._server_view = round, ServerState(round, **fixed)
        trainer.control = call_event(
            callbacks,
            event,
            trainer.args,
            trainer.state,
            trainer.control,
            round=round,
            server=self._server_view[1],
            model=trainer.model,
            **kwargs,
        )

    def end_round(self) -> None:
        """Call `on_round_end`, after the trainer has logged, evaluated and saved."""
        self._fire("on_round_end")

    def run_round(self, round: int) -> RoundSummary:
        """
        Run a round.

        Args:
            round (`int`): Round number, from 0.
        """
        config = self._setup.config
        with nullcontext() if self._shards is None else states_in_shards(self._shards):
            self.summary = self.loop.run(round)
        if config.local_steps is None:
            self.examples_seen += self.summary.num_examples * config.local_epochs
        else:
            # Counts full batches, as `Trainer` does for `max_steps`.
            self.examples_seen += self.summary.num_steps * self._trainer.get_total_train_batch_size(self._args)
        return self.summary

    def share_decisions(self, control: TrainerControl) -> None:
        """Apply each decision to log, evaluate, save or stop in all processes, if one process has taken it."""
        for decisions in self._setup.processes.gather(f"end of round {self.loop.round.number}", vars(control)):
            for name, is_set in decisions.items():
                setattr(control, name, getattr(control, name) or is_set)

    @property
    def flos_per_token(self) -> int:
        """Floating point operations of a training step per input token, as `Trainer` counts them."""
        # A residual adapter grows in each round.
        residual = self.exchange.residual
        num_values = 0 if residual is None else residual.num_values
        if num_values not in self._flos_per_token:
            one_token = {self._trainer.model.main_input_name: torch.empty(1)}
            self._flos_per_token = {num_values: Trainer.floating_point_ops(self._trainer, one_token)}
        return self._flos_per_token[num_values]

    def round_logs(self) -> dict[str, float]:
        """Log entries of a round that the parent trainer does not compute."""
        summary = self.summary
        logs: dict[str, float] = dict(summary.other_metrics)
        if summary.grad_norm is not None:
            logs["grad_norm"] = summary.grad_norm
        if num_tokens := train_tokens(self._trainer):
            logs["num_tokens"] = float(num_tokens)
        logs["federated/num_clients"] = summary.num_clients
        logs["federated/num_failed"] = summary.num_failed
        logs["federated/bytes_up"] = self.engine.ledger.bytes_up
        logs["federated/bytes_down"] = self.engine.ledger.bytes_down
        if self._setup.config.log_clients:
            for client_id, metrics in summary.clients.items():
                logs.update({f"client/{client_id}/{name}": value for name, value in metrics.items()})
        logs.update(self.loop.round.logs)
        return logs

    def evaluate_clients(self) -> dict[str, float]:
        """
        Evaluate the trainer's current model on each client's evaluation examples.

        Returns:
            `dict[str, float]`: Means and extremes over clients, from [`spread_over_clients`]. The metrics of each
            client are in `client_metrics`.
        """
        args = self._args
        self.loop.state = self._read_state()
        with nullcontext() if self._shards is None else states_in_shards(self._shards):
            self.client_metrics = self.loop.evaluate(self._evaluated_clients())
        return spread_over_clients(self.client_metrics, args.metric_for_best_model, args.greater_is_better)

    def _evaluated_clients(self) -> list[str]:
        """The clients that have evaluation examples, or all clients if none of them has any."""
        clients = self._setup.eval_clients
        if clients is None or not clients.is_remote:
            return list(clients or ())
        return [name for name, number in clients.num_rows.items() if number != 0] or list(clients)

    # ---- Checkpoints

    def save(self, checkpoint: Path) -> dict[str, str]:
        """
        Write the state of the federation to a checkpoint.

        Every process writes the states of its clients, and the main process also writes the state of the server.

        Args:
            checkpoint (`pathlib.Path`): A staged checkpoint in which the directory of the client states exists.

        Returns:
            `dict[str, str]`: SHA-256 digests of the client states of all processes, by path relative to the
            checkpoint.
        """
        setup, distillation = self._setup, self._setup.distillation
        directory, processes = clients_directory(checkpoint, setup.files), setup.processes
        digests = save_clients(directory, self.engine, setup, f"{checkpoint.name}: the clients' files")
        teacher_digests = save_folder(directory, self.teachers, TEACHERS_DIR, setup)
        step_digests = save_folder(directory, self._steps.store if setup.postprocessors else None, STEPS_DIR, setup)
        folders = {directory: digests, directory / TEACHERS_DIR: teacher_digests, directory / STEPS_DIR: step_digests}
        known_digests = {
            (folder / client_file_name(client_id)).relative_to(checkpoint).as_posix(): digest
            for folder, by_client in folders.items()
            for client_id, digest in by_client.items()
        }
        if not (processes.is_main or setup.is_sharded):
            return known_digests
        state = {
            "identity": federation_identity(setup, self._args),
            "aggregation": setup.aggregation.state_dict(),
            "bound": self._bound.state_dict(),
            "collector": setup.collector.state_dict(),
            "ledger": self.engine.ledger.state_dict(),
            "clients": digests,
            "teachers": teacher_digests,
            "steps": step_digests,
            "announcements": self._announcements.state_dict(),
            "sums_of_steps": self._steps.state_dict(),
        }
        if server_state := self._workers.server_store.get(SERVER_NAME):
            state["server_training"] = server_state
        if self.exchange.has_local:
            state["local"] = self.exchange.initial_local
        if distillation is not None:
            student = distillation.server.student.state_dict()
            state["distillation"] = {"algorithm": distillation.state_dict(), "student": student}
        if self.initial is not None:
            # Clients that have never trained start from the initial parameters.
            state["initial"] = self.initial
        if isinstance(self._trainer.model, PeftModel) or setup.is_sharded:
            state["weights"] = self.loop.state
        write_server_state(checkpoint, state, setup.files)
        return known_digests
