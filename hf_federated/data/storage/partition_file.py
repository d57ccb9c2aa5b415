"""`partition.json`: what a stored federated data set consists of.

It lists every client with its files, their sizes and hashes, so that a reader fetches exactly the files of the
clients that it asks for, and notices a file that is not the one that was written. It is read from disks and hubs, so
nothing in it is trusted: paths that leave the folder, wrong types and counts that do not fit are errors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from datasets import Features

from ...utils.client_names import escape_client_id
from ..source import DatasetSource


PARTITION_FILE = "partition.json"
FORMAT_VERSION = 1
# It begins the name of a file, of which file systems allow 255 bytes.
MAX_SPLIT_LENGTH = 100

_SPLIT = re.compile(r"\w+(\.\w+)*", re.ASCII)  # what `datasets` allows as the name of a split
_PATH = re.compile(r"(data/[a-z0-9_-]+|index)/[A-Za-z0-9_.]+(-\d{5}-of-\d{5})?\.parquet")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_T = TypeVar("_T")


class PartitionFileError(ValueError):
    """A `partition.json` that cannot be read, or files that are not those that it lists."""


@dataclass(frozen=True)
class StoredFile:
    """
    A file of a stored data set.

    Args:
        path (`str`): Path from the root of the folder or repository, with forward slashes.
        size (`int`): Bytes.
        sha256 (`str`): Hash of the bytes, 64 hex digits.
    """

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path):
            raise PartitionFileError(f"{PARTITION_FILE} names the file {self.path!r}, which is not a path of its own.")
        if not _SHA256.fullmatch(self.sha256):
            raise PartitionFileError(f"{PARTITION_FILE}: {self.sha256!r} is no SHA-256, of the file {self.path}.")

    @classmethod
    def describe(cls, root: Path, path: str) -> StoredFile:
        """What is at a path now."""
        with open(root / path, "rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
            return cls(path, file.tell(), digest.hexdigest())

    def read(self, root: Path, client_id: str | None = None) -> bytes:
        """
        The bytes of the file, which are those that were written.

        Raises:
            `PartitionFileError`: If it is missing or has other bytes.
        """
        whose = "" if client_id is None else f" of client {client_id!r}"
        try:
            content = (root / self.path).read_bytes()
        except OSError as error:
            raise PartitionFileError(
                f"The file {self.path}{whose} is missing in {root}, or cannot be read ({error}). Get the data set"
                " again."
            ) from error
        found = hashlib.sha256(content).hexdigest()
        if len(content) != self.size or found != self.sha256:
            raise PartitionFileError(
                f"The file {self.path}{whose} is not the one that {PARTITION_FILE} lists: it has {len(content)} bytes"
                f" with SHA-256 {found}, expected {self.size} bytes with {self.sha256}. It was changed or damaged"
                " after it was written; get the data set again, or save it anew."
            )
        return content


@dataclass(frozen=True)
class StoredRows:
    """
    One client's rows in one split.

    Args:
        num_rows (`int`): How many; at least one.
        files (`list[StoredFile]`): Where they lie, in order. Empty if the rows are numbers into a source.
        label_counts (`list[int]`, *optional*): Rows of each label, if they were published.
    """

    num_rows: int
    files: list[StoredFile] = field(default_factory=list)
    label_counts: list[int] | None = None


@dataclass(frozen=True)
class StoredClient:
    """
    Args:
        client_id (`str`): The client's id.
        name (`str`): Its name as a folder and as a configuration.
        splits (`dict[str, StoredRows]`): Its rows, for each split in which it has any.
    """

    client_id: str
    name: str
    splits: dict[str, StoredRows]

    def check(self) -> None:
        """Raises `PartitionFileError` unless the name is the client's own, and the files lie where they belong."""
        if not self.client_id or self.name != escape_client_id(self.client_id):
            raise PartitionFileError(
                f"{PARTITION_FILE}: the client {self.client_id!r} has the name {self.name!r}, which is not its own."
            )
        for split, rows in self.splits.items():
            for file in rows.files:
                if not file.path.startswith(f"data/{self.name}/{split}-"):
                    raise PartitionFileError(
                        f"{PARTITION_FILE}: the client {self.client_id!r} lists {file.path} for the split {split!r},"
                        " which is not a path of its own."
                    )


@dataclass(frozen=True)
class StoredIndex:
    """
    Row numbers of one split, for data that may not be copied.

    Args:
        file (`StoredFile`): A parquet file with one column `row`: all rows of the first client first.
        num_source_rows (`int`): Rows of the source.
        content (`str`): [`content_hash`] of the source.
        source (`DatasetSource`, *optional*): Where it can be had; its revision is a commit. `None` for local data.
    """

    file: StoredFile
    num_source_rows: int
    content: str
    source: DatasetSource | None


@dataclass(frozen=True)
class PartitionFile:
    """
    The content of a `partition.json`.

    Args:
        splits (`list[str]`): The splits, in order.
        features (`Features`): The columns that all clients have.
        clients (`list[StoredClient]`): The clients, in order.
        partitioning (`dict[str, dict[str, Any] | None]`): For each split, the partitioner and its settings.
        sources (`dict[str, DatasetSource]`): For each split, the data set on the Hub that was cut, if it is known.
        index (`dict[str, StoredIndex]`): For each split, the row numbers, if rows are not copied.
        label_column (`str`, *optional*): The column that the published label counts count.
        label_names (`list[str]`, *optional*): The labels, in the order of the counts.
    """

    splits: list[str]
    features: Features
    clients: list[StoredClient]
    partitioning: dict[str, dict[str, Any] | None]
    sources: dict[str, DatasetSource] = field(default_factory=dict)
    index: dict[str, StoredIndex] = field(default_factory=dict)
    label_column: str | None = None
    label_names: list[str] | None = None

    def __post_init__(self) -> None:
        ids = [client.client_id for client in self.clients]
        if not ids or len(set(ids)) < len(ids):
            raise PartitionFileError(f"{PARTITION_FILE} lists no client, or one twice.")
        for split in self.splits:
            check_split_name(split)
        if len(set(self.splits)) < len(self.splits):
            raise PartitionFileError(f"{PARTITION_FILE} lists a split twice: {self.splits}.")
        for client in self.clients:
            client.check()
        paths = [file.path for file in self.files()]
        if len(set(paths)) < len(paths):
            raise PartitionFileError(f"{PARTITION_FILE} lists a file twice.")

    def files(self) -> Iterator[StoredFile]:
        """All files beside `partition.json`."""
        for client in self.clients:
            for rows in client.splits.values():
                yield from rows.files
        for index in self.index.values():
            yield index.file

    def clients_of(self, split: str) -> list[StoredClient]:
        """The clients that have rows in a split, in order."""
        return [client for client in self.clients if split in client.splits]

    def to_json(self) -> str:
        """The text of the file: one line a client, so that versions of it can be compared."""
        head = {
            "format": "hf_federated.partition",
            "format_version": FORMAT_VERSION,
            "splits": self.splits,
            "features": self.features.to_dict(),
            "partitioning": self.partitioning,
            "sources": {split: source.to_dict() for split, source in self.sources.items()},
            "index": {split: _index_to_dict(index) for split, index in self.index.items()},
            "label_column": self.label_column,
            "label_names": self.label_names,
        }
        lines = [f'  "{key}": {json.dumps(value, ensure_ascii=False)},' for key, value in head.items()]
        clients = ",\n".join(
            f"    {json.dumps(_client_to_dict(client), ensure_ascii=False)}" for client in self.clients
        )
        return "\n".join(["{", *lines, '  "clients": [', clients, "  ]", "}"]) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> PartitionFile:
        """
        Reads the text of the file.

        Raises:
            `PartitionFileError`: If it is not JSON, lacks a key, has a value of a wrong type, or is of a newer format.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PartitionFileError(f"{PARTITION_FILE} is not JSON: {error}.") from error
        if not isinstance(raw, dict) or raw.get("format") != "hf_federated.partition":
            raise PartitionFileError(f"{PARTITION_FILE} was not written by hf_federated.")
        if raw.get("format_version") != FORMAT_VERSION:
            raise PartitionFileError(
                f"{PARTITION_FILE} has the format version {raw.get('format_version')!r}; this version of hf_federated"
                f" reads {FORMAT_VERSION}. Install the version that wrote it, or a newer one."
            )
        try:
            return _from_dict(raw)
        except PartitionFileError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise PartitionFileError(f"{PARTITION_FILE} is incomplete or damaged: {error!r}.") from error

    @classmethod
    def read(cls, folder: Path) -> PartitionFile:
        """Reads the file in a folder. Raises `FileNotFoundError` if there is none."""
        path = folder / PARTITION_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no {PARTITION_FILE} in {folder}, so it holds no federated data set. A data set that was"
                " saved by `datasets` is read by datasets.load_from_disk and cut by FederatedDataset.from_dataset."
            )
        return cls.from_json(path.read_bytes())


def check_split_name(split: str) -> None:
    """Raises `ValueError` unless `datasets` takes the name for a split."""
    if not isinstance(split, str) or not _SPLIT.fullmatch(split) or split == "all" or len(split) > MAX_SPLIT_LENGTH:
        raise ValueError(
            f"{split!r} cannot name a split: use letters, digits and underscores, in parts separated by dots,"
            f' {MAX_SPLIT_LENGTH} characters at most, and not "all". For example: "train".'
        )


def _client_to_dict(client: StoredClient) -> dict[str, Any]:
    splits: dict[str, Any] = {}
    for split, rows in client.splits.items():
        entry: dict[str, Any] = {"num_rows": rows.num_rows}
        if rows.files:
            entry["files"] = [vars(file) for file in rows.files]
        if rows.label_counts is not None:
            entry["label_counts"] = rows.label_counts
        splits[split] = entry
    return {"id": client.client_id, "name": client.name, "splits": splits}


def _index_to_dict(index: StoredIndex) -> dict[str, Any]:
    return {
        "file": vars(index.file),
        "num_source_rows": index.num_source_rows,
        "content": index.content,
        "source": None if index.source is None else index.source.to_dict(),
    }


def _from_dict(raw: Mapping[str, Any]) -> PartitionFile:
    splits = [_typed(split, str, "split") for split in _typed(raw["splits"], list, "splits")]
    index = {split: _index_from_dict(entry) for split, entry in raw["index"].items()}
    clients = [_client_from_dict(entry, splits, index.keys()) for entry in _typed(raw["clients"], list, "clients")]
    if not set(index) <= set(splits):
        raise PartitionFileError(f"{PARTITION_FILE}: there is an index of {sorted(index)}; the splits are {splits}.")
    return PartitionFile(
        splits=splits,
        features=Features.from_dict(_typed(raw["features"], dict, "features")),
        clients=clients,
        partitioning={
            split: None if settings is None else _typed(settings, dict, "partitioning")
            for split, settings in _typed(raw["partitioning"], dict, "partitioning").items()
        },
        sources={split: DatasetSource(**source) for split, source in raw["sources"].items()},
        index=index,
        label_column=raw["label_column"],
        label_names=raw["label_names"],
    )


def _client_from_dict(raw: Mapping[str, Any], splits: Sequence[str], indexed: Any) -> StoredClient:
    client_id = _typed(raw["id"], str, "id")
    stored = {}
    for split, entry in raw["splits"].items():
        if split not in splits:
            raise PartitionFileError(
                f"{PARTITION_FILE}: client {client_id!r} has the split {split!r}, not in {splits}."
            )
        num_rows = _typed(entry["num_rows"], int, "num_rows")
        files = [StoredFile(**file) for file in entry.get("files", [])]
        if num_rows < 1 or bool(files) == (split in indexed):
            raise PartitionFileError(f"{PARTITION_FILE}: the rows of client {client_id!r} in {split!r} lie nowhere.")
        stored[split] = StoredRows(num_rows, files, entry.get("label_counts"))
    return StoredClient(client_id, _typed(raw["name"], str, "name"), stored)


def _index_from_dict(raw: Mapping[str, Any]) -> StoredIndex:
    source = raw["source"]
    return StoredIndex(
        file=StoredFile(**raw["file"]),
        num_source_rows=_typed(raw["num_source_rows"], int, "num_source_rows"),
        content=_typed(raw["content"], str, "content"),
        source=None if source is None else DatasetSource(**source),
    )


def _typed(value: Any, kind: type[_T], name: str) -> _T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PartitionFileError(f"{PARTITION_FILE}: {name} must be a {kind.__name__}, got {value!r}.")
    return value
