"""`Journal`: a file to which a process appends entries that must survive a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .storage import PRIVATE, storage_errors, sync_folder
from .untrusted_json import parse_json


class Journal:
    """
    Entries on disk, one JSON object a line. Only the owner of the file may read it.

    Args:
        path (`pathlib.Path`): The file. It need not exist.

    Example:

    ```python
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from hf_federated.utils.journal import Journal

    >>> with TemporaryDirectory() as folder:
    ...     journal = Journal(Path(folder, "journal.jsonl"))
    ...     journal.append([{"round": 0}])
    ...     journal.append([{"round": 1}])
    ...     journal.read()
    [{'round': 0}, {'round': 1}]
    ```
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Number of bytes of the complete lines, once they have been counted.
        self._num_bytes: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """
        Read all entries. An incomplete last line is ignored, because the process was killed while it wrote the line.

        Raises:
            ValueError: If the file is damaged.
        """
        entries = []
        for line in self._lines():
            try:
                entry = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{str(self.path)!r} is damaged: {error}.") from error
            if not isinstance(entry, dict):
                raise ValueError(f"{str(self.path)!r} is damaged: {line[:80]!r} is not an entry.")
            entries.append(entry)
        return entries

    def append(self, entries: Iterable[Mapping[str, Any]], is_durable: bool = True) -> None:
        """
        Append entries. When the method returns, they are on disk.

        Args:
            entries (`Iterable[Mapping[str, Any]]`): Values of JSON by name.
            is_durable (`bool`, *optional*, defaults to `True`): Whether the entries must survive a power failure. If
                not, they only survive the process until the next durable entry is on disk.
        """
        with storage_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._num_bytes is None:
                self._num_bytes = sum(map(len, self._lines()))
            is_new = not self.path.exists()
            self._num_bytes = _write(self.path, entries, self._num_bytes, is_durable)
            if is_new:
                sync_folder(self.path.parent)

    def replace(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """
        Replace all entries at once.

        Args:
            entries (`Iterable[Mapping[str, Any]]`): The new entries.
        """
        staged = self.path.with_suffix(".incomplete")
        with storage_errors(self.path.parent):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._num_bytes = _write(staged, entries, 0)
            os.replace(staged, self.path)
            sync_folder(self.path.parent)

    def _lines(self) -> list[bytes]:
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
        return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


def _write(path: Path, entries: Iterable[Mapping[str, Any]], start: int, is_durable: bool = True) -> int:
    """Write entries from a position to the end of a file. Return the length of the file."""
    # Only the owner of the file may read it.
    with open(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE), "r+b") as file:
        file.seek(start)
        file.writelines(json.dumps(entry).encode() + b"\n" for entry in entries)
        file.truncate()
        file.flush()
        if is_durable:
            os.fsync(file.fileno())
        return file.tell()
