"""The runs of a benchmark that are done: `runs.jsonl`, one line a run, which survives whatever ends the process.

A finished run is appended in one write and synced to the disk before the next begins, so that a process killed at any
moment loses the run in progress and no other. What a killed writer left of a line is cut off by the next one. Nothing
is ever rewritten: a run made again is another line, and the last one counts.

One benchmark at a time writes to a folder. This is held by a lock of the operating system on `runs.lock`, which goes
with the process however it ends. Windows has no such lock (`fcntl` is missing); there nobody is kept out, and starting
two benchmarks in one folder may run the same runs twice, but tears no line that a process has finished writing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.grid import PlannedRun


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # mypy knows the module only

LOG_NAME = "runs.jsonl"
LOCK_NAME = "runs.lock"


@dataclass(frozen=True)
class Finished:
    """
    What a log holds of a plan.

    Args:
        records (`dict[tuple[str, int], dict]`): Name and seed of a run to its last record under the planned settings.
        stale (`list[PlannedRun]`): Runs of which there are records under other settings only. These are not used.
    """

    records: dict[tuple[str, int], dict[str, Any]]
    stale: list[PlannedRun]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """
    The records of a folder in the order in which they were written; none if nothing was. Writes nothing, so that it
    may be called beside a running benchmark: a line that is being written is left out.

    Raises:
        CommandError: If a line is no record, with its number.
    """
    path = folder / LOG_NAME
    if not path.exists():
        return []
    with command_errors(str(path)):
        content = path.read_bytes()
    lines = content[: _end_of_whole_lines(content)].splitlines()
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def finished(records: Sequence[Mapping[str, Any]], plan: Sequence[PlannedRun]) -> Finished:
    """
    The records that are of planned runs: name, seed and digest agree. The last one of each counts.

    Args:
        records (`Sequence[Mapping]`): Those of a log, in its order.
        plan (`Sequence[PlannedRun]`): The runs of a grid.
    """
    made = {(record["run"], record["seed"], record["digest"]): dict(record) for record in records}
    known = {(record["run"], record["seed"]) for record in records}
    wanted = {run.key: (run.name, run.seed, run.digest) for run in plan}
    found = {key: made[identity] for key, identity in wanted.items() if identity in made}
    return Finished(found, [run for run in plan if run.key in known and run.key not in found])


class RunLog:
    """
    The log of a folder, open for writing; a context manager.

    Args:
        folder (`Path`): Where `runs.jsonl` lies. It is made if need be.

    Raises:
        CommandError: On entering, if another benchmark writes to the folder, or a line is no record.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> from hf_federated.experiments.run_log import RunLog, read_records

    >>> folder = Path(tempfile.mkdtemp())
    >>> with RunLog(folder) as log:
    ...     log.append({"run": "FedAvg", "seed": 0, "digest": "ab", "value": float("nan")})
    >>> read_records(folder)
    [{'run': 'FedAvg', 'seed': 0, 'digest': 'ab', 'value': None}]

    ```
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self._lock: BinaryIO | None = None

    def __enter__(self) -> RunLog:
        with command_errors(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.folder / LOCK_NAME)
        try:
            with command_errors(str(self.folder)):
                _repair(self.folder / LOG_NAME)
            self.records = read_records(self.folder)
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()  # and with it the lock

    def append(self, record: Mapping[str, Any]) -> None:
        """
        Adds a finished run. When this returns, the record is on the disk.

        Args:
            record (`Mapping[str, Any]`):
                What JSON can hold, with `run`, `seed` and `digest`. Numbers that are not finite are written as null.

        Raises:
            OSError: If it cannot be written whole, say because the disk is full; then nothing of it is left.
        """
        plain = finite(record)
        line = (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
        path = self.folder / LOG_NAME
        with open(path, "ab", buffering=0) as file:  # without a buffer a write is one call of the system
            before = os.fstat(file.fileno()).st_size
            if file.write(line) != len(line):
                file.truncate(before)
                raise OSError(f"{path}: the record of a run could not be written whole; is the disk full?")
            os.fsync(file.fileno())
        if before == 0:
            _sync_folder(self.folder)
        self.records.append(plain)

    def finished(self, plan: Sequence[PlannedRun]) -> Finished:
        """What of a plan is done; see [`finished`]."""
        return finished(self.records, plan)


def _lock(path: Path) -> BinaryIO:
    """The lock file, locked for as long as it is open."""
    file = open(path, "a+b")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise CommandError(
                f"another benchmark is running in this folder: {path.parent}. Wait for it, or give another"
                " --output-dir; --report prints what is there so far."
            ) from error
    return file


def _end_of_whole_lines(content: bytes) -> int:
    """
    Where the whole lines end. Records are written with the end of their line, in one write: what stands behind the
    last end is the beginning of a record, unless somebody has edited the file and left the end out.
    """
    end = content.rfind(b"\n") + 1
    return end if _parsed(content[end:]) is None else len(content)


def _repair(path: Path) -> None:
    """Cuts off what a killed writer left of a line, and ends a whole one that has no end."""
    if not path.exists():
        return
    content = path.read_bytes()
    end = _end_of_whole_lines(content)
    with open(path, "r+b") as file:
        file.truncate(end)
        if end and not content[:end].endswith(b"\n"):
            file.seek(end)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def _parsed(line: bytes) -> Any:
    """The object of a line of JSON, or `None`. No beginning of an object is an object."""
    try:
        value = json.loads(line)
    except ValueError:  # also what is no UTF-8
        return None
    return value if isinstance(value, dict) else None


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = _parsed(line)
    if record is None:
        raise CommandError(f"{where}: is no JSON object. Remove the line to have its run made again.")
    for name, kind in (("run", str), ("seed", int), ("digest", str)):
        if not isinstance(record.get(name), kind):
            raise CommandError(
                f"{where}: is no record of a run, for {name!r} is {record.get(name)!r}. Remove the line to have its"
                " run made again."
            )
    return record


def finite(value: Any) -> Any:
    """A value as strict JSON holds it, which knows neither NaN nor infinity."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _sync_folder(folder: Path) -> None:
    """The file's name is on the disk too. Windows opens no folders, and needs it not."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
