"""`RunView`: what a run has done so far, read from the files in its output folder. It imports no trainer.

[`read_run`] reads the log of the run. For a run without a log, such as one of an earlier version, it reads the state
of the trainer in the last checkpoint.
"""

from __future__ import annotations

import math
import os
import re
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..utils.file_lock import read_holder
from ..utils.run_files import LOCK_FILE, NETWORK_FOLDER, STATUS_NAME
from ..utils.untrusted_json import read_json
from .metric_names import is_metric
from .run_log import (
    CLIENTS_NAME,
    LOG_NAME,
    MAX_CLIENTS,
    STATES,
    ClientEntry,
    ClientsSnapshot,
    RoundEntry,
    RunEnd,
    RunStart,
    logged_values,
    read_clients,
    read_log,
)


# Files that change while a run lasts.
WATCHED = (LOG_NAME, CLIENTS_NAME, LOCK_FILE, f"{NETWORK_FOLDER}/{STATUS_NAME}")
TRAINER_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
# Rounds whose median is the time of a round.
_RECENT_ROUNDS = 10
# The counts of a round in the log of a trainer, by their fields in [`RoundEntry`].
_COUNTS = {"num_clients": "num_done", "num_failed": "num_failed", "bytes_down": "bytes_down", "bytes_up": "bytes_up"}
# The status of a server, in the words of this module.
_SERVER_STATES = {"working": "training", "late": "late", "absent": "absent", "expelled": "expelled"}


@dataclass(frozen=True)
class RunView:
    """
    What a run has done so far.

    Args:
        name (`str`): Name of the output folder.
        state (`str`): `"running"`, `"complete"`, `"stopped"`, or how the run failed.
        start ([`~hf_federated.reporting.run_log.RunStart`]): The start of the run.
        rounds (`tuple[RoundEntry, ...]`): The rounds. The last one may not be over.
        clients (`dict[str, ClientEntry]`): The clients of the current round by id.
        ended (`float`, *optional*): When the run ended, in seconds since 1970.
        step_name (`str`): What a step of the log is.

    Example:

    ```python
    >>> from hf_federated.reporting.run_view import read_run

    >>> run = read_run("outputs/run")  # doctest: +SKIP
    >>> run.state, run.num_finished, run.seconds_left()  # doctest: +SKIP
    ('running', 3, 74.2)
    ```
    """

    name: str
    state: str
    start: RunStart
    rounds: tuple[RoundEntry, ...] = ()
    clients: dict[str, ClientEntry] = field(default_factory=dict)
    ended: float | None = None
    step_name: str = "round"

    @property
    def finished(self) -> tuple[RoundEntry, ...]:
        """The rounds that are over."""
        return tuple(entry for entry in self.rounds if entry.is_over)

    @property
    def num_finished(self) -> int:
        """Number of the last round that is over, or 0."""
        return self.finished[-1].number if self.finished else 0

    @property
    def updated(self) -> float:
        """When the run last wrote, in seconds since 1970."""
        return max(self.start.time, self.ended or 0, *(entry.time for entry in self.rounds[-1:]), *self._times())

    def _times(self) -> Iterable[float]:
        return (client.since for client in self.clients.values() if client.since is not None)

    @property
    def bytes_down(self) -> int | None:
        """Bytes from the server to the clients."""
        return next((entry.bytes_down for entry in self.rounds[::-1] if entry.bytes_down is not None), None)

    @property
    def bytes_up(self) -> int | None:
        """Bytes from the clients to the server."""
        return next((entry.bytes_up for entry in self.rounds[::-1] if entry.bytes_up is not None), None)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of the global model, the metric for the best model first."""
        names = dict.fromkeys(name for entry in self.rounds for name in entry.logs if is_metric(name))
        best = f"eval_{(self.start.best_metric or '').removeprefix('eval_')}"
        return sorted(names, key=lambda name: (name != best, name == "eval_loss"))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return the rounds at which a value was logged, with the value."""
        return [(entry.number, entry.logs[name]) for entry in self.rounds if name in entry.logs]

    def last(self, name: str) -> float | None:
        """Return the last logged value of a name."""
        return next((entry.logs[name] for entry in self.rounds[::-1] if name in entry.logs), None)

    def counts(self) -> dict[str, int]:
        """Return the number of clients in each state, the states that need attention first."""
        found = Counter(client.state for client in self.clients.values())
        return {state: found[state] for state in STATES if found[state]}

    def seconds_per_round(self) -> float | None:
        """Median seconds of the last rounds."""
        seconds = [entry.seconds for entry in self.finished if entry.seconds is not None]
        return statistics.median(seconds[-_RECENT_ROUNDS:]) if seconds else None

    def seconds_left(self, now: float | None = None) -> float | None:
        """
        Estimate the seconds until the last round is over, from the median time of the last rounds.

        Args:
            now (`float`, *optional*): Now, in seconds since 1970.
        """
        each, last = self.seconds_per_round(), self.finished[-1:]
        if each is None or self.state != "running":
            return None
        elapsed = (time.time() if now is None else now) - last[0].time
        return max(0.0, (self.start.num_rounds - self.num_finished) * each - min(max(elapsed, 0.0), each))


def read_run(folder: str | os.PathLike[str]) -> RunView:
    """
    Read what a run has done so far, also while the run lasts.

    Args:
        folder (`str` or `os.PathLike`): Output folder of the run, or the folder of all parties of a network.

    Raises:
        FileNotFoundError: If the folder contains no run.
        ValueError: If a file is damaged. The message names the file.
    """
    path = run_folder(Path(folder))
    log = read_log(path)
    if log is None:
        return _from_trainer_state(path)
    rounds = {entry.number: entry for entry in log if isinstance(entry, RoundEntry)}
    start = next(entry for entry in log if isinstance(entry, RunStart))
    end = log[-1] if isinstance(log[-1], RunEnd) else None
    snapshot = read_clients(path)
    if snapshot is not None and snapshot.time < start.time:
        snapshot = None  # An earlier run wrote it.
    is_running = end is None and is_training(path)
    clients = _clients(path, snapshot, start) if snapshot is not None or is_running else {}
    if not is_running:
        # The process ended in the middle of a round.
        clients = {name: _at_rest(client) for name, client in clients.items()}
    return RunView(
        name=path.resolve().name,
        state=end.state if end is not None else "running" if is_running else "stopped",
        start=start,
        rounds=tuple(rounds[number] for number in sorted(rounds)),
        clients=clients,
        ended=None if end is None else end.time,
    )


def run_folder(path: Path) -> Path:
    """
    Return the folder that contains the log or a checkpoint: the folder itself, or its subfolder `server`.

    Raises:
        FileNotFoundError: If neither contains a run.
    """
    for folder in (path, path / "server"):
        if (folder / LOG_NAME).is_file() or trainer_state_of(folder) is not None:
            return folder
    raise FileNotFoundError(
        f"{os.fspath(path)!r} contains no run: neither {LOG_NAME} nor {TRAINER_STATE}. Pass the output folder of a "
        "run that has begun its first round or saved a checkpoint."
    )


def trainer_state_of(folder: Path) -> Path | None:
    """Return the state of the trainer in a folder, or else in its last checkpoint."""
    if (path := folder / TRAINER_STATE).is_file():
        return path
    found = [(int(match[1]), each) for each in _subfolders(folder) if (match := _CHECKPOINT.fullmatch(each.name))]
    states = [each / TRAINER_STATE for _, each in sorted(found, reverse=True)]
    return next((state for state in states if state.is_file()), None)


def _subfolders(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def is_training(folder: Path) -> bool:
    """Whether a process trains in the folder, as far as a reader on this machine can see."""
    holder = read_holder(folder / LOCK_FILE)
    if holder is None:
        return False
    process, host = holder
    if host != socket.gethostname() or os.name == "nt":
        return True
    try:
        os.kill(process, 0)  # No signal is sent.
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # A process of another user.
    return True


def _at_rest(client: ClientEntry) -> ClientEntry:
    return replace(client, state="waiting") if client.state in ("training", "late") else client


def _clients(folder: Path, snapshot: ClientsSnapshot | None, start: RunStart) -> dict[str, ClientEntry]:
    """The clients of the snapshot, with what only the server of a network knows: absent, late and expelled clients."""
    clients = {} if snapshot is None else dict(snapshot.clients)
    for name, state in _server_states(folder, start).items():
        known = clients.get(name, ClientEntry())
        if state is not None and len(clients) < MAX_CLIENTS:
            clients[name] = replace(known, state=state, since=known.since if known.state == state else None)
    return clients


def _server_states(folder: Path, start: RunStart) -> dict[str, str | None]:
    path = folder / NETWORK_FOLDER / STATUS_NAME
    try:
        status = read_json(path)
    except FileNotFoundError:
        return {}
    found = status.get("clients") if isinstance(status, dict) else None
    updated = status.get("updated_at") if isinstance(status, dict) else None
    if not isinstance(found, dict) or not isinstance(updated, (int, float)):
        raise ValueError(f"{str(path)!r} is not the status of a run.")
    if updated < start.time:
        return {}  # An earlier run wrote it.
    return {
        name: _SERVER_STATES.get(str(client.get("state")))
        for name, client in found.items()
        if isinstance(client, dict)
    }


def _from_trainer_state(folder: Path) -> RunView:
    """Read a run without a log, such as one of an earlier version or of a plain `Trainer`."""
    path = trainer_state_of(folder)
    if path is None:
        raise FileNotFoundError(f"{os.fspath(folder)!r} contains no run.")
    state: Any = read_json(path)
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise ValueError(f"{str(path)!r} is not the state of a trainer.")
    steps = sorted({step for entry in history if type(step := entry.get("step")) is int and step >= 0})
    written = path.stat().st_mtime
    rounds = []
    for step in steps:
        logs = logged_values(history, step)
        counts: dict[str, Any] = {
            field: int(logs[f"federated/{name}"])
            for name, field in _COUNTS.items()
            if math.isfinite(logs.get(f"federated/{name}", math.nan))
        }
        rounds.append(RoundEntry(number=step, time=written, logs=logs, **counts))
    is_federated = any("federated/num_clients" in entry.logs for entry in rounds)
    num_steps = state.get("max_steps")
    start = RunStart(
        time=written,
        num_rounds=num_steps if type(num_steps) is int and num_steps > 0 else max(steps, default=0),
        num_clients=max((entry.num_done or 0 for entry in rounds), default=0),
        method="",
    )
    return RunView(
        name=folder.resolve().name,
        state="running" if is_training(folder) else "saved",
        start=start,
        rounds=tuple(rounds),
        step_name="round" if is_federated else "step",
    )
