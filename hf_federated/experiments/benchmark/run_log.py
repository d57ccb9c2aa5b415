"""The log of finished benchmark runs, `runs.jsonl`: one line per run, safe against crashes of the process.

A finished run is appended with a single write and synced to disk before the next run starts. If the process is killed,
only the run in progress is lost. The next writer removes an incomplete last line. Complete lines are never rewritten:
a repeated run is appended as another line, and the last line of a run counts.

Only one benchmark can write to a folder at a time. An operating system lock on `runs.lock` ensures this; the system
releases the lock when the process ends, for any reason. Windows has no such lock (`fcntl` is missing). Two benchmarks
in one folder on Windows may execute the same runs twice, but they do not damage complete lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_federated.experiments.benchmark.grid import PlannedRun
from hf_federated.experiments.benchmark.identity import file_times_digest, has_inputs
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.strict_json import to_strict_json
from hf_federated.utils.file_lock import FileLock, FileLockedError

from ...utils.storage import sync_folder
from ...utils.untrusted_json import parse_json


LOG_NAME = "runs.jsonl"
LOCK_NAME = "runs.lock"


@dataclass(frozen=True)
class FinishedRuns:
    """
    The planned runs that a log contains.

    Args:
        records (`dict[tuple[str, int], dict]`): Maps the name and seed of a run to its last record with the planned
            settings.
        stale (`list[PlannedRun]`): Runs that have only records with different settings. These records are not used.
    """

    records: dict[tuple[str, int], dict[str, Any]]
    stale: list[PlannedRun]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """
    Read the records of a folder in the order of writing.

    The function does not write to the folder, so it is safe while a benchmark is running. It ignores an incomplete
    last line.

    Args:
        folder (`Path`): The folder of `runs.jsonl`. If the file does not exist, there are no records.

    Raises:
        CommandError: If a line is not a record. The message contains the line number.
    """
    path = folder / LOG_NAME
    if not path.exists():
        return []
    with command_errors(str(path)):
        content = path.read_bytes()
    lines = content[: _length_of_complete_lines(content)].splitlines()
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def find_finished(
    records: Sequence[Mapping[str, Any]],
    plan: Sequence[PlannedRun],
    inputs_of: Callable[[PlannedRun], Mapping[str, Any]] | None = None,
) -> FinishedRuns:
    """
    Find the records of planned runs, by name, seed and settings. The last record of a run counts.

    Args:
        records (`Sequence[Mapping]`): The records of a log, in the order of writing.
        plan (`Sequence[PlannedRun]`): The runs of a grid.
        inputs_of (`Callable`, *optional*): Returns the hashes of the examples and the weights that a run reads. It is
            called for runs whose records have other locations of data and models, or whose files have been written
            since, and the hashes must be those of the record. By default, the record of the same settings counts
            wherever its data and models were.
    """
    by_key: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records:
        by_key.setdefault((record["run"], record["seed"]), []).append(record)
    found = {}
    for run in plan:
        last = find_record(by_key.get(run.key, ()), run, inputs_of)
        if last is not None:
            found[run.key] = dict(last)
    return FinishedRuns(found, [run for run in plan if run.key in by_key and run.key not in found])


def find_record(
    records: Sequence[Mapping[str, Any]],
    run: PlannedRun,
    inputs_of: Callable[[PlannedRun], Mapping[str, Any]] | None = None,
) -> Mapping[str, Any] | None:
    """
    The last record of the settings of a run. The arguments are those of [`find_finished`].

    A record of the same locations comes before a record of other locations. An old record has no digest of the times
    of its files, and counts for its locations.
    """
    for record in reversed(records):
        if run.full_digest in (record.get("full_digest"), record["digest"]):  # old records have only the full digest
            if inputs_of is None or record.get("file_times") in (None, file_times_digest(run.values)):
                return record
    similar = [record for record in records if record["digest"] == run.digest]
    if not similar or inputs_of is None:
        return similar[-1] if similar else None
    inputs = inputs_of(run)
    return next((record for record in reversed(similar) if has_inputs(record, inputs)), None)


class RunLog:
    """
    Context manager that opens the log of a folder for writing.

    Args:
        folder (`Path`): The folder of `runs.jsonl`. It is created if it does not exist.

    Raises:
        CommandError: On entering, if another benchmark writes to the folder, or a line is not a record.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> from hf_federated.experiments.benchmark.run_log import RunLog, read_records

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
        self._lock = FileLock(folder / LOCK_NAME)

    def __enter__(self) -> RunLog:
        with command_errors(str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except FileLockedError as error:
                raise CommandError(
                    f"another benchmark is running in this folder: {self.folder} ({error.holder}). Wait until it ends,"
                    " or choose another --output-dir. --report prints the results so far."
                ) from error
        try:
            with command_errors(str(self.folder)):
                _repair(self.folder / LOG_NAME)
            self.records = read_records(self.folder)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def append(self, record: Mapping[str, Any]) -> None:
        """
        Append the record of a finished run and sync it to disk.

        Args:
            record (`Mapping[str, Any]`):
                Values that JSON supports, including `run`, `seed` and `digest`. Numbers that are not finite are
                written as null.

        Raises:
            OSError: If the record cannot be written completely, for example because the disk is full. No part of the
                record remains in the file.
        """
        plain = to_strict_json(record)
        line = (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
        path = self.folder / LOG_NAME
        with open(path, "ab", buffering=0) as file:  # without a buffer, a write is a single system call
            before = os.fstat(file.fileno()).st_size
            if file.write(line) != len(line):
                file.truncate(before)
                raise OSError(
                    f"{path}: the record of a run was not written completely. Check whether the disk is full."
                )
            os.fsync(file.fileno())
        if before == 0:
            sync_folder(self.folder)
        self.records.append(plain)


def _length_of_complete_lines(content: bytes) -> int:
    """
    Return the length of the complete lines.

    A record is written together with its newline. The content after the last newline is therefore an incomplete
    record, unless a user edited the file and removed the last newline.
    """
    end = content.rfind(b"\n") + 1
    return end if _parse_object(content[end:]) is None else len(content)


def _repair(path: Path) -> None:
    """Remove an incomplete last line, and add a missing newline to a complete last line."""
    if not path.exists():
        return
    content = path.read_bytes()
    end = _length_of_complete_lines(content)
    with open(path, "r+b") as file:
        file.truncate(end)
        if end and not content[:end].endswith(b"\n"):
            file.seek(end)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def _parse_object(line: bytes) -> Any:
    """Return the JSON object of a line, or `None`. A truncated object is never a valid object."""
    try:
        value = parse_json(line)
    except ValueError:  # includes invalid UTF-8
        return None
    return value if isinstance(value, dict) else None


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = _parse_object(line)
    if record is None:
        raise CommandError(f"{where}: is not a JSON object. Remove the line to execute its run again.")
    for name, kind in (("run", str), ("seed", int), ("digest", str)):
        if not isinstance(record.get(name), kind):
            raise CommandError(
                f"{where}: is not a record of a run, because {name!r} is {record.get(name)!r}. Remove the line to"
                " execute its run again."
            )
    return record
