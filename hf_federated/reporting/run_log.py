"""The files of a run that lasts: a log with one line a round, and the clients of the current round.

The main process of a run is the only writer ([`~hf_federated.trainer.run_recorder.RunRecorder`]). It appends a line to
`_rounds.jsonl` when the updates of a round have arrived, and another line when the round is over. It replaces
`_clients.json` at most once a second. A resumed run removes the lines of rounds after its checkpoint.

Names and numbers of values are limited: a line has at most 200 kB, and usually less than 1 kB. `Trainer.push_to_hub`
does not upload the files, because their names start with an underscore.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..utils.fields import Count, ShortText, check_values, describe
from ..utils.journal import Journal
from ..utils.printable import printable
from ..utils.untrusted_json import read_json


LOG_NAME = "_rounds.jsonl"
CLIENTS_NAME = "_clients.json"
# Largest number of logged values and of failed clients of a round, and of clients of a run, that the files name.
MAX_VALUES = 100
MAX_FAILED = 20
MAX_CLIENTS = 1000
# Longest name of a value, id of a client, and reason of a failure. A client with a longer id is not listed.
MAX_NAME = 80
MAX_ID = 200
MAX_REASON = 200
_MAX_LOG_BYTES = 128 * 1024**2
_KIND = "kind"
# Logged values that are left out: those of single clients and of the whole run, and durations.
_PREFIXES = ("client/", "train_")
_SUFFIXES = ("_runtime", "_per_second")
# The states of a client, in the order in which a reader wants to see them.
STATES = ("failed", "expelled", "late", "training", "absent", "done", "waiting")


@dataclass(frozen=True)
class RunStart:
    """
    The start of a run, or of a resumed run. It is the first line of the log.

    Args:
        time (`float`): When the run started, in seconds since 1970.
        num_rounds (`int`): Number of rounds of the run.
        num_clients (`int`): Number of clients.
        method (`str`): Class of the method.
        best_metric (`str`, *optional*): `metric_for_best_model` of the training arguments.
        greater_is_better (`bool`, *optional*): `greater_is_better` of the training arguments.
        resumed (`list[int]`): Number of finished rounds at each resume.
        federation (`dict[str, Any]`): The fields of [`FederatedConfig`].
        arguments (`dict[str, Any]`): Training arguments that influence the trained weights.
    """

    time: float
    num_rounds: Count
    num_clients: Count
    method: ShortText
    best_metric: ShortText | None = None
    greater_is_better: bool | None = None
    resumed: list[int] = field(default_factory=list)
    federation: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundEntry:
    """
    A round. The log has a line when its updates have arrived, and another line when it is over.

    Args:
        number (`int`): Number of the round, from 1.
        time (`float`): When the line was written, in seconds since 1970.
        seconds (`float`, *optional*): Seconds since the round began.
        is_over (`bool`): Whether the trainer has logged, evaluated and saved.
        logs (`dict[str, float]`): Values that the trainer logged for the round.
        num_done (`int`, *optional*): Number of clients whose updates were accepted.
        failed (`dict[str, str]`): Clients that failed or were rejected, with the reason, at most `MAX_FAILED`.
        num_failed (`int`, *optional*): Number of these clients.
        bytes_down (`int`, *optional*): Bytes from the server to the clients since the first round.
        bytes_up (`int`, *optional*): Bytes from the clients to the server since the first round.
    """

    number: Count
    time: float
    seconds: float | None = None
    is_over: bool = True
    logs: dict[str, float] = field(default_factory=dict)
    num_done: Count | None = None
    failed: dict[str, str] = field(default_factory=dict)
    num_failed: Count | None = None
    bytes_down: Count | None = None
    bytes_up: Count | None = None


@dataclass(frozen=True)
class RunEnd:
    """
    The end of a run.

    Args:
        time (`float`): When the run ended, in seconds since 1970.
        state (`str`): `"complete"`, or how the run failed.
        local_loops (`dict[str, int]`): Number of local trainings of this process by loop: `"lean"`, or why they used
            the loop of `Trainer`.
    """

    time: float
    state: ShortText
    local_loops: dict[str, int] = field(default_factory=dict)


@dataclass
class ClientEntry:
    """
    A client of a run.

    Args:
        state (`str`): One of `STATES`.
        since (`float`, *optional*): When the state began, in seconds since 1970.
        reason (`str`, *optional*): Why the client failed.
        loss (`float`, *optional*): Training loss in the client's last round.
        num_rounds (`int`): Number of rounds in which the server sent a message to the client.
        num_failures (`int`): Number of rounds in which the client failed. It can be too small after a resume, because
            the log names at most 20 failed clients of a round.
        bytes_down (`int`): Bytes to the client.
        bytes_up (`int`): Bytes from the client.
    """

    state: ShortText = "waiting"
    since: float | None = None
    reason: ShortText | None = None
    loss: float | None = None
    num_rounds: Count = 0
    num_failures: Count = 0
    bytes_down: Count = 0
    bytes_up: Count = 0


@dataclass(frozen=True)
class ClientsSnapshot:
    """
    The clients of the current round.

    Args:
        time (`float`): When the file was written, in seconds since 1970.
        round (`int`): Number of the round, from 1.
        clients (`dict[str, ClientEntry]`): The clients by id, at most `MAX_CLIENTS`.
    """

    time: float
    round: Count
    clients: dict[str, ClientEntry]


_KINDS: dict[str, type[RunStart] | type[RoundEntry] | type[RunEnd]] = {
    "run": RunStart,
    "round": RoundEntry,
    "end": RunEnd,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}
_CLIENT_FIELDS = tuple(item.name for item in dataclasses.fields(ClientEntry))
LogEntry = RunStart | RoundEntry | RunEnd


def to_line(entry: LogEntry) -> dict[str, Any]:
    """Return the JSON values of a line of the log."""
    return {_KIND: _NAMES[type(entry)], **vars(entry)}


def logged_values(log_history: Iterable[Mapping[str, Any]], step: int) -> dict[str, float]:
    """
    Return the numbers that a trainer logged for a step, without values of single clients and durations.

    Args:
        log_history (`Iterable[Mapping[str, Any]]`): Entries of `log_history`.
        step (`int`): The step.
    """
    found: dict[str, float] = {}
    for entry in log_history:
        if entry.get("step") != step:
            continue
        for name, value in entry.items():
            number = as_number(value)
            is_left_out = name in ("step", "epoch") or name.startswith(_PREFIXES) or name.endswith(_SUFFIXES)
            if number is not None and not is_left_out:
                if len(found) < MAX_VALUES:
                    found.setdefault(printable(name, MAX_NAME), number)
    return found


def as_number(value: Any) -> float | None:
    """Return a JSON value as a float, or `None` if it is no number, or an integer beyond the range of floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def read_log(folder: Path) -> list[LogEntry] | None:
    """
    Read the log of a run. An incomplete last line is ignored, because the run writes it or was killed meanwhile.

    Args:
        folder (`pathlib.Path`): Output folder of the run.

    Returns:
        `list`, *optional*: The start of the run, then its rounds, then its end, or `None` if there is no log.

    Raises:
        ValueError: If the log is damaged. The message names the file.
    """
    path = folder / LOG_NAME
    if not path.is_file():
        return None
    if (num_bytes := path.stat().st_size) > _MAX_LOG_BYTES:
        raise ValueError(f"{str(path)!r} has {num_bytes} bytes, and at most {_MAX_LOG_BYTES} are allowed.")
    entries = [_parse(path, values) for values in Journal(path).read()]
    if entries and not isinstance(entries[0], RunStart):
        raise ValueError(f"{str(path)!r} is damaged: it does not begin with the start of a run.")
    return entries or None


def _parse(path: Path, values: dict[str, Any]) -> LogEntry:
    cls = _KINDS.get(str(values.pop(_KIND, None)))
    where = f"{str(path)!r} is damaged: "
    if cls is None:
        raise ValueError(f"{where}a line is no entry of a log.")
    return _build(cls, values, where)


def _build(cls: Any, values: Any, where: str) -> Any:
    """Build a dataclass from values of a file, without fields that a later version may have added."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}{describe(values)} is not a dictionary.")
    known = {item.name: values[item.name] for item in dataclasses.fields(cls) if item.name in values}
    check_values(cls, known, where)
    try:
        return cls(**known)
    except TypeError as error:
        raise ValueError(f"{where}{error}.") from error


def dump_clients(round: int, time: float, clients: Mapping[str, ClientEntry]) -> bytes:
    """
    Return the content of `_clients.json`.

    Args:
        round (`int`): Number of the round, from 1.
        time (`float`): Now, in seconds since 1970.
        clients (`Mapping[str, ClientEntry]`): The clients by id.
    """
    rows = {name: [*vars(client).values()] for name, client in clients.items()}
    return json.dumps({"time": time, "round": round, "fields": _CLIENT_FIELDS, "clients": rows}).encode()


def read_clients(folder: Path) -> ClientsSnapshot | None:
    """
    Read the clients of the current round.

    Args:
        folder (`pathlib.Path`): Output folder of the run.

    Raises:
        ValueError: If the file is damaged. The message names the file.
    """
    path = folder / CLIENTS_NAME
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    where = f"{str(path)!r} is damaged: "
    rows, names = (values.get(key) if isinstance(values, dict) else None for key in ("clients", "fields"))
    if not isinstance(rows, dict) or not isinstance(names, list) or len(rows) > MAX_CLIENTS:
        raise ValueError(f"{where}it has no table of clients.")
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows.values()):
        raise ValueError(f"{where}a client has another number of fields.")
    clients = {
        name: _build(ClientEntry, dict(zip(map(str, names), row, strict=True)), where) for name, row in rows.items()
    }
    snapshot = {"time": values.get("time"), "round": values.get("round"), "clients": clients}
    return _build(ClientsSnapshot, snapshot, where)
