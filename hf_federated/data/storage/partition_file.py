"""`partition.json`: the index of a stored federated dataset.

The file lists every client with its files, their sizes and their hashes. A reader can therefore fetch exactly the
files of the requested clients, and detect a changed file. The content comes from disks and from the Hub and is not
trusted: paths outside the folder, wrong types and inconsistent counts are errors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from datasets import Features

from ...utils.client_names import escape_client_id
from ...utils.fields import check_of
from ...utils.file_hash import sha256_of_file
from ...utils.untrusted_json import MAX_FILE_BYTES, MAX_FILE_VALUES, parse_json
from ..source import DatasetSource


PARTITION_FILE = "partition.json"
FORMAT_VERSION = 1
# The split name is the start of a file name, and file systems allow 255 bytes for a file name.
MAX_SPLIT_LENGTH = 100

_SPLIT = re.compile(r"\w+(\.\w+)*", re.ASCII)  # split names that `datasets` accepts
_PATH = re.compile(r"(data/[a-z0-9_-]+|index)/[A-Za-z0-9_.]+(-\d{5}-of-\d{5})?\.parquet")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_T = TypeVar("_T")


class PartitionFileError(ValueError):
    """A `partition.json` is invalid, or the stored files differ from the files that it lists."""


@dataclass(frozen=True)
class StoredFile:
    """
    One file of a stored federated dataset.

    Args:
        path (`str`): Path relative to the folder or repository, with forward slashes.
        size (`int`): Size in bytes.
        sha256 (`str`): SHA-256 of the content, 64 hexadecimal digits.
    """

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path):
            raise PartitionFileError(f"{PARTITION_FILE} lists the file {self.path!r}, which is not a valid path.")
        if not _SHA256.fullmatch(self.sha256):
            raise PartitionFileError(f"{PARTITION_FILE}: {self.sha256!r} of the file {self.path} is not a SHA-256.")

    @classmethod
    def describe(cls, root: Path, path: str) -> StoredFile:
        """Create the entry for an existing file."""
        return cls(path, (root / path).stat().st_size, sha256_of_file(root / path))

    def read(self, root: Path, client_id: str | None = None) -> bytes:
        """
        Read the file and verify its size and hash.

        Raises:
            `PartitionFileError`: If the file is missing or has different content.
        """
        owner = "" if client_id is None else f" of client {client_id!r}"
        try:
            content = (root / self.path).read_bytes()
        except OSError as error:
            raise PartitionFileError(
                f"The file {self.path}{owner} is missing in {root}, or cannot be read ({error}). Get the dataset"
                " again."
            ) from error
        found = hashlib.sha256(content).hexdigest()
        if len(content) != self.size or found != self.sha256:
            raise PartitionFileError(
                f"The file {self.path}{owner} differs from its entry in {PARTITION_FILE}: it has {len(content)} bytes"
                f" with SHA-256 {found}, expected {self.size} bytes with {self.sha256}. The file was changed or"
                " damaged after it was written. Get the dataset again, or save it again."
            )
        return content


@dataclass(frozen=True)
class StoredRows:
    """
    The rows of one client in one split.

    Args:
        num_rows (`int`): Number of rows, at least 1.
        files (`list[StoredFile]`): The files with the rows, in order. Empty if only row numbers are stored.
        label_counts (`list[int]`, *optional*): Number of rows per label, if the counts are published.
    """

    num_rows: int
    files: list[StoredFile] = field(default_factory=list)
    label_counts: list[int] | None = None


@dataclass(frozen=True)
class StoredClient:
    """
    One client of a stored federated dataset.

    Args:
        client_id (`str`): Id of the client.
        name (`str`): Name of the client in folder names and configurations.
        splits (`dict[str, StoredRows]`): Rows of the client, for each split that contains the client.
    """

    client_id: str
    name: str
    splits: dict[str, StoredRows]

    def check(self) -> None:
        """Raise `PartitionFileError` unless the name matches the id and the files are in the folder of the client."""
        if not self.client_id or self.name != escape_client_id(self.client_id):
            raise PartitionFileError(
                f"{PARTITION_FILE}: the client {self.client_id!r} has the name {self.name!r}, which does not match"
                " its id."
            )
        for split, rows in self.splits.items():
            for file in rows.files:
                if not file.path.startswith(f"data/{self.name}/{split}-"):
                    raise PartitionFileError(
                        f"{PARTITION_FILE}: the client {self.client_id!r} lists {file.path} for the split {split!r},"
                        " which is not in the folder of the client."
                    )


@dataclass(frozen=True)
class StoredIndex:
    """
    The row numbers of one split, for data that must not be copied.

    Args:
        file (`StoredFile`): A parquet file with one column `row`. The rows of the first client come first.
        num_source_rows (`int`): Number of rows of the source.
        content (`str`): [`content_hash`] of the source.
        source (`DatasetSource`, *optional*): The source on the Hub, at a commit. `None` for local data.
    """

    file: StoredFile
    num_source_rows: int
    content: str
    source: DatasetSource | None


@dataclass(frozen=True)
class PartitionFile:
    """
    The content of `partition.json`.

    Args:
        splits (`list[str]`): The splits, in order.
        features (`Features`): The columns that all clients have.
        clients (`list[StoredClient]`): The clients, in order.
        partitioning (`dict[str, dict[str, Any] | None]`): For each split, the partitioner and its settings.
        sources (`dict[str, DatasetSource]`): For each split, the dataset on the Hub that was partitioned, if known.
        index (`dict[str, StoredIndex]`): For each split, the row numbers, if the rows are not copied.
        label_column (`str`, *optional*): The column of the published label counts.
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
            raise PartitionFileError(f"{PARTITION_FILE} lists no client, or lists a client twice.")
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
        """Iterate over all files except `partition.json`."""
        for client in self.clients:
            for rows in client.splits.values():
                yield from rows.files
        for index in self.index.values():
            yield index.file

    def clients_of(self, split: str) -> list[StoredClient]:
        """Return the clients that have rows in a split, in order."""
        return [client for client in self.clients if split in client.splits]

    def to_json(self) -> str:
        """Return the JSON text, with one line per client, so that versions of the file are easy to compare."""
        head = {
            "format": "hf_federated.partition",
            "format_version": FORMAT_VERSION,
            "splits": self.splits,
            "features": self.features.to_dict(),
            "partitioning": self.partitioning,
            "sources": self.sources,
            "index": self.index,
            "label_column": self.label_column,
            "label_names": self.label_names,
        }
        encode = partial(json.dumps, ensure_ascii=False, default=asdict)
        lines = [f'  "{key}": {encode(value)},' for key, value in head.items()]
        clients = ",\n".join(f"    {encode(_client_to_dict(client))}" for client in self.clients)
        return "\n".join(["{", *lines, '  "clients": [', clients, "  ]", "}"]) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> PartitionFile:
        """
        Parse the JSON text.

        Raises:
            `PartitionFileError`: If the text is not JSON, lacks a key, has a value of a wrong type, or has a newer
                format.
        """
        try:
            raw = parse_json(text, MAX_FILE_BYTES, MAX_FILE_VALUES, max_text=None)
        except (ValueError, RecursionError) as error:
            raise PartitionFileError(f"{PARTITION_FILE} is not JSON: {error}.") from error
        if not isinstance(raw, dict) or raw.get("format") != "hf_federated.partition":
            raise PartitionFileError(f"{PARTITION_FILE} was not written by hf_federated.")
        if raw.get("format_version") != FORMAT_VERSION:
            raise PartitionFileError(
                f"{PARTITION_FILE} has the format version {raw.get('format_version')!r}, but this version of"
                f" hf_federated reads version {FORMAT_VERSION}. Install the version of hf_federated that wrote it, or"
                " a newer version."
            )
        try:
            return _from_dict(raw)
        except PartitionFileError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise PartitionFileError(f"{PARTITION_FILE} is incomplete or damaged: {error!r}.") from error

    @classmethod
    def read(cls, folder: Path) -> PartitionFile:
        """Read the file in a folder. Raises `FileNotFoundError` if the folder has none."""
        path = folder / PARTITION_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no {PARTITION_FILE}, so it is not a federated dataset. Load a dataset that was saved by"
                " `datasets` with datasets.load_from_disk, and partition it with FederatedDataset.from_dataset."
            )
        return cls.from_json(path.read_bytes())


def check_split_name(split: str) -> None:
    """Raise `ValueError` unless `datasets` accepts the name of a split."""
    if not isinstance(split, str) or not _SPLIT.fullmatch(split) or split == "all" or len(split) > MAX_SPLIT_LENGTH:
        raise ValueError(
            f"{split!r} is not a valid split name. Use letters, digits and underscores, in parts separated by dots,"
            f' at most {MAX_SPLIT_LENGTH} characters, and not "all". For example: "train".'
        )


def _client_to_dict(client: StoredClient) -> dict[str, Any]:
    splits = {
        split: {name: value for name, value in vars(rows).items() if value} for split, rows in client.splits.items()
    }
    return {"id": client.client_id, "name": client.name, "splits": splits}


def _from_dict(raw: Mapping[str, Any]) -> PartitionFile:
    splits = [_typed(split, str, "split") for split in _typed(raw["splits"], list, "splits")]
    index = {split: _index_from_dict(entry) for split, entry in raw["index"].items()}
    clients = [_client_from_dict(entry, splits, index.keys()) for entry in _typed(raw["clients"], list, "clients")]
    if not set(index) <= set(splits):
        raise PartitionFileError(f"{PARTITION_FILE} has an index for {sorted(index)}, but the splits are {splits}.")
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
                f"{PARTITION_FILE}: client {client_id!r} has the split {split!r}, which is not in {splits}."
            )
        num_rows = _typed(entry["num_rows"], int, "num_rows")
        files = [StoredFile(**file) for file in entry.get("files", [])]
        if num_rows < 1 or bool(files) == (split in indexed):
            raise PartitionFileError(
                f"{PARTITION_FILE}: client {client_id!r} must have rows in {split!r}, and either files or an index."
            )
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
    if check_of(kind)(value) is not None:
        raise PartitionFileError(f"{PARTITION_FILE}: {name} must be of type {kind.__name__}, got {value!r}.")
    return value
