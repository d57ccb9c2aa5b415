"""`RunRecorder`: writes the log of a run while it lasts, which `hf-federated watch` and `compare` read."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from ..cards.card_record import ARGUMENTS
from ..cards.log_history import to_json_value
from ..messages import ClientUpdate
from ..methods import Round
from ..reporting.run_log import (
    CLIENTS_NAME,
    LOG_NAME,
    MAX_CLIENTS,
    MAX_FAILED,
    MAX_ID,
    MAX_REASON,
    ClientEntry,
    LogEntry,
    RoundEntry,
    RunEnd,
    RunStart,
    dump_clients,
    logged_values,
    read_log,
    to_line,
)
from ..server import FederatedCallback
from ..utils.journal import Journal
from ..utils.printable import printable
from ..utils.storage import replace_private
from .setup import FederationSetup


logger = logging.get_logger(__name__)

# Smallest number of seconds between two writes of the clients, also as a multiple of the seconds that a write takes.
_INTERVAL = 1.0
_PAUSE = 250


def _on_writer(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method only in the process that writes, and only until a write has failed: a full disk ends no run."""

    @functools.wraps(method)
    def call(self: RunRecorder, *args: Any, **kwargs: Any) -> None:
        if self._journal is None:
            return
        try:
            method(self, *args, **kwargs)
        except OSError as error:
            self._journal = None
            logger.warning(f"The log of the run ({LOG_NAME}) cannot be written, and is no longer written: {error}")

    return call


class RunRecorder(FederatedCallback):
    """
    Writes the log of a run, and the clients of the current round, to the output directory.

    The trainer adds this callback. The main process writes, while it holds the lock of the output directory. A client
    of a federation on several machines writes nothing.

    Args:
        trainer ([`FederatedTrainer`]): The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # `None` while nothing is written.
        self._journal: Journal | None = None
        self._folder = Path()
        self._clients: dict[str, ClientEntry] = {}
        self._began = self._next_write = 0.0

    # ---- Start and end of the run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        setup: FederationSetup = self._trainer._federation_setup
        self._journal = None
        if self._trainer._joined is None and setup.processes.is_main and args.output_dir:
            self._folder = Path(args.output_dir)
            self._journal = Journal(self._folder / LOG_NAME)
            self._start(setup, self._trainer.run_args, state)

    @_on_writer
    def _start(self, setup: FederationSetup, args: TrainingArguments, state: TrainerState) -> None:
        """Begin the log. A resumed run keeps the rounds up to its checkpoint."""
        earlier, resumed = self._earlier(state)
        federation = setup.config.to_dict()
        if isinstance(federation["max_examples_per_client"], dict):
            federation["max_examples_per_client"] = None  # One number for each client.
        start = RunStart(
            time=time.time(),
            num_rounds=setup.num_rounds,
            num_clients=len(setup.clients),
            method=type(setup.methods[-1]).__name__,
            best_metric=args.metric_for_best_model,
            greater_is_better=args.greater_is_better,
            resumed=resumed,
            federation={name: to_json_value(value) for name, value in federation.items()},
            arguments=_arguments(args, self._trainer.model),
        )
        self._clients = {
            name: ClientEntry() for name in itertools.islice(setup.clients, MAX_CLIENTS) if _is_listed(name)
        }
        if state.global_step:
            self._restore_clients(earlier)
        if self._journal is not None:
            self._journal.replace([to_line(start), *map(to_line, earlier)])
        (self._folder / CLIENTS_NAME).unlink(missing_ok=True)

    def _earlier(self, state: TrainerState) -> tuple[list[RoundEntry], list[int]]:
        """The rounds before the checkpoint of a resumed run, and the number of finished rounds at each resume."""
        if not state.global_step:
            return [], []
        try:
            log = read_log(self._folder) or []
        except ValueError as error:
            logger.warning(f"The earlier rounds of the log are lost: {error}")
            log = []
        known = {entry.number: entry for entry in log if isinstance(entry, RoundEntry)}
        resumed = [number for entry in log if isinstance(entry, RunStart) for number in entry.resumed]
        rounds = []
        down = up = 0
        accounts = {row["round"] + 1: row for row in self._trainer.ledger.rounds()}
        for number in range(1, state.global_step + 1):
            # The checkpoint decides what was logged. The file may be of another run, or end before the checkpoint.
            logs = logged_values(state.log_history, number)
            down += accounts.get(number, {}).get("bytes_down", 0)
            up += accounts.get(number, {}).get("bytes_up", 0)
            entry = known.get(number)
            if entry is None or (entry.is_over and entry.logs != logs):
                entry = RoundEntry(number=number, time=0.0, is_over=False)
            if not entry.is_over:
                entry = replace(entry, logs=logs, is_over=True, bytes_down=down, bytes_up=up)
            rounds.append(entry)
        return rounds, [*(number for number in resumed if number < state.global_step), state.global_step]

    def _restore_clients(self, earlier: Iterable[RoundEntry]) -> None:
        """Restore the totals of each client from the ledger and the earlier rounds."""
        for name, row in self._trainer.ledger.clients().items():
            if name in self._clients:
                for field, value in row.items():
                    setattr(self._clients[name], field, value)
        for entry in earlier:
            for name in entry.failed:
                if name in self._clients:
                    self._clients[name].num_failures += 1

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.end("complete")

    @_on_writer
    def end(self, state: str) -> None:
        """
        Write how the run ended. Later calls do nothing.

        Args:
            state (`str`): `"complete"`, or how the run failed.
        """
        worker = getattr(self._trainer.engine, "worker", None)
        loops = {} if worker is None else worker.local_loops
        self._append(RunEnd(time.time(), printable(state, 500), loops))
        self._write_clients(self._trainer.state.global_step, is_last=True)
        self._journal = None

    # ---- Rounds

    @_on_writer
    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, round: Round, **kwargs: Any
    ) -> None:
        self._began = time.monotonic()
        now = time.time()
        for client in self._clients.values():
            client.state, client.since, client.reason = "waiting", now, None
        self._write_clients(round.number + 1)

    @_on_writer
    def on_client_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        client_id: str,
        round: Round,
        **kwargs: Any,
    ) -> None:
        self._set(client_id, "training")
        self._write_clients(round.number + 1)

    @_on_writer
    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        round: Round,
        **kwargs: Any,
    ) -> None:
        self._set(update.client_id, "done")
        self._write_clients(round.number + 1)

    @_on_writer
    def on_aggregate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, round: Round, **kwargs: Any
    ) -> None:
        # With secure aggregation, the server has no metrics of a client.
        for name in round.metrics or round.clients:
            if (client := self._set(name, "done")) is not None:
                client.loss = round.metrics.get(name, {}).get("loss")
        self._append(self._entry(round, is_over=False))

    @_on_writer
    def on_round_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, round: Round, **kwargs: Any
    ) -> None:
        for name, reason in round.rejected.items():
            if (failed := self._set(name, "failed")) is not None:
                failed.reason = printable(reason, MAX_REASON)
                failed.num_failures += 1
        for name, (down, up) in self._trainer.ledger.accounts(round.number).items():
            if (client := self._clients.get(name)) is not None:
                client.bytes_down += down
                client.bytes_up += up
                client.num_rounds += 1
        # The entries of this round are the last ones.
        recent = itertools.takewhile(lambda entry: entry.get("step", 0) > round.number, reversed(state.log_history))
        self._append(self._entry(round, is_over=True, logs=logged_values(list(recent)[::-1], round.number + 1)))
        self._write_clients(round.number + 1)

    def _entry(self, round: Round, is_over: bool, logs: dict[str, float] | None = None) -> RoundEntry:
        failed = itertools.islice(filter(_is_listed, round.rejected), MAX_FAILED)
        return RoundEntry(
            number=round.number + 1,
            time=time.time(),
            seconds=time.monotonic() - self._began,
            is_over=is_over,
            logs=logs or {},
            num_done=len(round.metrics or round.clients),
            failed={name: printable(round.rejected[name], MAX_REASON) for name in failed},
            num_failed=len(round.rejected),
            bytes_down=self._trainer.ledger.bytes_down,
            bytes_up=self._trainer.ledger.bytes_up,
        )

    # ---- Files

    def _append(self, entry: LogEntry) -> None:
        if self._journal is not None:
            self._journal.append([to_line(entry)], is_durable=False)

    def _set(self, client_id: str, state: str) -> ClientEntry | None:
        client = self._clients.get(client_id)
        if client is None and len(self._clients) < MAX_CLIENTS and _is_listed(client_id):
            client = self._clients[client_id] = ClientEntry()
        if client is not None and client.state != state:
            client.state, client.since = state, time.time()
        return client

    def _write_clients(self, round: int, is_last: bool = False) -> None:
        began = time.monotonic()
        if is_last or began >= self._next_write:
            replace_private(self._folder / CLIENTS_NAME, dump_clients(round, time.time(), self._clients))
            end = time.monotonic()
            self._next_write = end + max(_INTERVAL, _PAUSE * (end - began))


def _is_listed(client_id: str) -> bool:
    return len(client_id) <= MAX_ID


def _arguments(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """Return the name of the model, and the training arguments that influence the trained weights."""
    values = {name: to_json_value(getattr(args, name)) for name in ARGUMENTS}
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    return {"model": name if isinstance(name, str) else None, **values}
