"""`RoundRecords`: the sums of secure aggregation on disk, so that a resumed run does not ask for a second sum."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...messages.serialization import pack, unpack
from ...utils.fields import Count, check_values
from ...utils.storage import storage_errors, write_private


FOLDER = "federated"
_NAME = re.compile(r"round-(\d+)\.safetensors")


@dataclass(frozen=True)
class RoundRecord:
    """
    The result of the secure aggregation of a round. It contains no update of a single client.

    Args:
        round (`int`): Round number, from 0.
        digest (`str`): Digest of the requests of local training.
        total (`torch.Tensor` of shape `(num_values,)`): Sum of the encoded updates, without masks.
        survivors (`list[str]`): The clients in the sum, sorted.
        failures (`dict[str, str]`): Why other clients are not in the sum.
        states (`dict[str, str]`): Name of the state of each client after the round.
        num_bytes (`dict[str, list[int]]`): Number of bytes to and from each client of the cohort.
    """

    round: Count
    digest: str
    total: torch.Tensor
    survivors: list[str]
    failures: dict[str, str]
    states: dict[str, str]
    num_bytes: dict[str, list[Count]]


class RoundRecords:
    """
    Records of the rounds after a checkpoint, one file for each round. Only the owner may read them.

    A client agrees to one sum of a round, because the difference of two sums can be one update. A server that resumes
    a run therefore uses the recorded sums, and asks no client.

    Args:
        folder (`pathlib.Path`): Folder of the files.
        first_needed (`Callable[[], int]`): Returns the first round that a resumed run can repeat.
    """

    def __init__(self, folder: Path, first_needed: Callable[[], int]) -> None:
        self.folder = folder
        self._first_needed = first_needed

    def write(self, record: RoundRecord) -> None:
        """Write a record, and delete those that no checkpoint needs. When the method returns, it is on disk."""
        with storage_errors(self.folder, lambda: record.total.nbytes):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_private(self._path(record.round), pack(dict(vars(record))))
        first = self._first_needed()
        for number, path in self._files().items():
            if number < first:
                path.unlink(missing_ok=True)

    def read(self, round: int, digest: str) -> RoundRecord | None:
        """
        Return the record of a round, or `None` if there is none for these requests.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self._path(round)
        if not path.is_file():
            return None
        where = f"{str(path)!r} is damaged: "
        try:
            fields = unpack(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{where}{error} Restore the file from a backup, or start a new run.") from error
        if not isinstance(fields, dict) or fields.keys() != set(RoundRecord.__dataclass_fields__):
            raise ValueError(f"{where}it is no record of a round. Start a new run.")
        check_values(RoundRecord, fields, where)
        record = RoundRecord(**fields)
        return record if (record.round, record.digest) == (round, digest) else None

    def clear(self) -> None:
        """Delete all records. A new run must not use those of another run."""
        for path in self._files().values():
            path.unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round}.safetensors"

    def _files(self) -> dict[int, Path]:
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return {int(match[1]): path for path in found if (match := _NAME.fullmatch(path.name)) is not None}
