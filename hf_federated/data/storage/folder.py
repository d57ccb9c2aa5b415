"""A federated data set as a folder: parquet files, `partition.json` and a card.

The same folder is what a push to the Hub commits. It is written beside its place and renamed, so that it is complete
or absent. This module knows rows and files only; `FederatedDataset` and `FederatedDatasetDict` are built on it.
"""

from __future__ import annotations

import glob
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from datasets.table import embed_table_storage
from datasets.utils.py_utils import convert_file_size_to_int
from huggingface_hub.utils import tqdm

from ...utils.client_names import escape_client_ids
from ..client_datasets import ClientDatasets, PartitionedDataset
from ..partitioners.base import Partition, check_client_ids, row_number_dtype
from ..source import DatasetSource, content_hash
from .parquet_datasets import ParquetDatasets
from .partition_file import (
    PARTITION_FILE,
    PartitionFile,
    PartitionFileError,
    StoredClient,
    StoredFile,
    StoredIndex,
    StoredRows,
    check_split_name,
)


# What is written beside the data files and `partition.json`.
README = "README.md"
PICTURES = {name: f"pictures/{name}.png" for name in ("sizes", "labels", "divergence")}
GENERATED = (README, *PICTURES.values())


@dataclass(frozen=True)
class SplitToStore:
    """
    One split of what is to be stored.

    Args:
        rows ([`ClientDatasets`]): The rows of its clients.
        partitioning (`dict[str, Any]`, *optional*): How they were given away.
        source ([`DatasetSource`], *optional*): The data set on the Hub that was cut, if it is known.
    """

    rows: ClientDatasets
    partitioning: dict[str, Any] | None
    source: DatasetSource | None


@dataclass(frozen=True)
class PublishedCounts:
    """
    Args:
        column (`str`): The column that was counted.
        names (`list[str]`): The labels, in the order of the counts.
        counts (`dict[str, np.ndarray]`): For each split `int64` of shape `(num_clients, num_labels)`.
    """

    column: str
    names: list[str]
    counts: dict[str, np.ndarray]


def write_files(
    folder: Path,
    splits: Mapping[str, SplitToStore],
    label_counts: PublishedCounts | None = None,
    max_shard_size: int | str = "500MB",
    index_only: bool = False,
    token: bool | str | None = None,
) -> PartitionFile:
    """
    Writes the data files and `partition.json` into an empty folder.

    Args:
        folder (`Path`):
            An empty folder.
        splits (`Mapping[str, SplitToStore]`):
            What is stored, by split.
        label_counts ([`PublishedCounts`], *optional*):
            Counts to publish.
        max_shard_size (`int` or `str`, *optional*, defaults to `"500MB"`):
            A client's rows are spread over files of about this size in memory.
        index_only (`bool`, *optional*, defaults to `False`):
            Writes row numbers instead of rows.
        token (`bool` or `str`, *optional*):
            For a source on the Hub, which is compared with the rows that were cut.

    Raises:
        `ValueError`: If a split has an impossible name, or splits differ in their columns.
        `TypeError`: If a client is an `IterableDataset`.
    """
    _check_splits(splits)
    max_bytes = _bytes(max_shard_size)
    ids = list(dict.fromkeys(client_id for split in splits.values() for client_id in split.rows.client_ids))
    names = escape_client_ids(ids)
    stored: dict[str, dict[str, StoredRows]] = {client_id: {} for client_id in ids}
    index: dict[str, StoredIndex] = {}
    for split, to_store in splits.items():
        if index_only:
            index[split], rows_of = _write_index(folder, split, to_store, token)
        else:
            rows_of = _write_clients(folder, split, to_store.rows, names, max_bytes)
        for position, (client_id, (num_rows, files)) in enumerate(rows_of.items()):
            counts = None if label_counts is None else label_counts.counts[split][position].tolist()
            stored[client_id][split] = StoredRows(num_rows, files, counts)
    partition_file = PartitionFile(
        splits=list(splits),
        features=next(iter(splits.values())).rows.schema_dataset.features,
        clients=[StoredClient(client_id, names[client_id], stored[client_id]) for client_id in ids],
        partitioning={split: to_store.partitioning for split, to_store in splits.items()},
        sources={split: to_store.source for split, to_store in splits.items() if to_store.source is not None},
        index=index,
        label_column=None if label_counts is None else label_counts.column,
        label_names=None if label_counts is None else label_counts.names,
    )
    (folder / PARTITION_FILE).write_text(partition_file.to_json(), encoding="utf-8")
    return partition_file


def save_folder(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """
    Puts a folder in its place once it is complete.

    A federated data set that is there already is replaced; anything else is not.

    Args:
        path (`str`): Where the folder shall be.
        write (`Callable[[Path], object]`): Fills an empty folder.

    Killed between its two last steps, which are renames, it leaves both versions beside the place, and a reader says
    where.

    Raises:
        `FileExistsError`: If something else than a federated data set is there.
        `ValueError`: If the current directory is, or lies in, the folder.
    """
    place = Path(path).resolve()
    if place in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(
            f"{place} is the current directory or holds it, and would be replaced. Save to another folder."
        )
    foreign = _foreign_file(place)
    if foreign is not None:
        raise FileExistsError(
            f"{place} holds something else than a federated data set ({foreign}), which would be replaced. Choose"
            " another folder, or remove it first."
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    new, old = work / "new", work / "old"
    try:
        new.mkdir()
        write(new)
        if place.exists():
            _make_room(place, old)
        try:
            os.rename(new, place)
        except BaseException:
            if old.exists():
                os.rename(old, place)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with suppress(OSError):
            work.rmdir()  # Not if what was there could not be put back: it stays, and a reader says where.


def _make_room(place: Path, old: Path) -> None:
    try:
        os.rename(place, old)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}; a mount point cannot be replaced, so save to a folder inside it",
            str(place),
        ) from error


def _foreign_file(place: Path) -> str | None:
    """A file of a folder that is not one of a federated data set; `None` if there is none, or no folder."""
    if not place.exists():
        return None
    if not place.is_dir():
        return place.name
    there = {path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir()}
    if not there:
        return None
    try:
        stored = PartitionFile.read(place)
    except (FileNotFoundError, PartitionFileError):
        return min(there)
    return min(there - {PARTITION_FILE, *GENERATED, *(file.path for file in stored.files())}, default=None)


def open_folder(path: str | os.PathLike[str]) -> PartitionFile:
    """
    What a folder holds.

    Raises:
        `FileNotFoundError`: If it holds no federated data set. Where a save was killed between its two last steps, the
            message says where the data set lies.
        `PartitionFileError`: If `partition.json` cannot be read.
    """
    place = Path(path).absolute()
    try:
        return PartitionFile.read(place)
    except FileNotFoundError as error:
        left = sorted(place.parent.glob(f".{glob.escape(place.name)}-*/old/{PARTITION_FILE}"))
        if not left:
            raise
        raise FileNotFoundError(
            f"There is no {place}: a save was killed at its last step. What was there lies in {left[-1].parent}; move"
            " it back."
        ) from error


def open_split(
    partition_file: PartitionFile,
    root: Path,
    split: str,
    clients: Sequence[str] | None = None,
    source: Dataset | None = None,
    token: bool | str | None = None,
) -> ClientDatasets:
    """
    The rows of a split, from files that lie in a folder.

    Args:
        partition_file ([`PartitionFile`]): What the folder holds.
        root (`Path`): The folder. The files of the clients asked for have to be there.
        split (`str`): The split.
        clients (`Sequence[str]`, *optional*): Ids of the clients to read, in this order; all of the split if left out.
        source (`datasets.Dataset`, *optional*): The rows that were cut, if only their numbers are stored.
        token (`bool` or `str`, *optional*): For a source on the Hub.

    Raises:
        `PartitionFileError`: If a file is missing or is not the one that was written, or `source` are other rows.
        `ValueError`: If there is no such split.
        `KeyError`: If there is no such client, or it has no rows in the split.
    """
    root = root.absolute()  # a client may be opened after the current directory changed
    chosen = choose_clients(partition_file, split, clients)
    if split in partition_file.index:
        return _rows_by_number(partition_file, root, split, chosen, source, token)
    if source is not None:
        raise ValueError(f"The split {split!r} is stored with its rows, so it takes no source=.")
    stored = {client.client_id: client.splits[split] for client in chosen}
    rows = ParquetDatasets(root, partition_file.features, stored)
    rows.check()
    return rows


def choose_clients(partition_file: PartitionFile, split: str, clients: Sequence[str] | None) -> list[StoredClient]:
    """The clients asked for that a split has, in the order asked for. Errors as in [`open_split`]."""
    if split not in partition_file.splits:
        raise ValueError(f"There is no split {split!r}. The splits are: {', '.join(partition_file.splits)}.")
    there = {client.client_id: client for client in partition_file.clients_of(split)}
    if clients is None:
        return list(there.values())
    check_requested_clients(clients)
    for client_id in clients:
        if client_id not in there:
            raise KeyError(
                f"There is no client {client_id!r} in the split {split!r}; it has {len(there)}, the first is"
                f" {next(iter(there), None)!r}."
            )
    return [there[client_id] for client_id in clients]


def check_requested_clients(clients: Sequence[str]) -> None:
    """Raises `TypeError` for a single string, and `ValueError` for no client or one that is asked for twice."""
    if isinstance(clients, str):
        raise TypeError(f"clients must be a list of ids, got the string {clients!r}.")
    if not clients:
        raise ValueError("The list of clients is empty.")
    check_client_ids(clients)


def _check_splits(splits: Mapping[str, SplitToStore]) -> None:
    if not splits:
        raise ValueError("There is no split to store.")
    (first_name, first), *others = splits.items()
    check_split_name(first_name)
    for name, split in others:
        check_split_name(name)
        if split.rows.schema_dataset.features != first.rows.schema_dataset.features:
            raise ValueError(
                f"The splits {first_name!r} and {name!r} differ in their columns, types or label names:"
                f" {first.rows.schema_dataset.features} and {split.rows.schema_dataset.features}. Cast them to the same."
            )
    for split in splits.values():
        _check_settings(split.partitioning or {})


def _check_settings(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The setting {name}={value!r} of {settings.get('partitioner')} cannot be written as JSON ({error})."
                " Let the partitioner's settings() return numbers, texts, truth values and lists of them."
            ) from error


def _bytes(max_shard_size: int | str) -> int:
    try:
        size = convert_file_size_to_int(max_shard_size)
    except (ValueError, AttributeError, TypeError):
        size = 0
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f'max_shard_size must be a size such as "500MB" or a number of bytes, got {max_shard_size!r}.'
        )
    return size


def _write_clients(
    folder: Path, split: str, rows: ClientDatasets, names: Mapping[str, str], max_shard_bytes: int
) -> dict[str, tuple[int, list[StoredFile]]]:
    written: dict[str, tuple[int, list[StoredFile]]] = {}
    # `disable=None` shows no bar where nobody looks at one
    for client_id in tqdm(rows.client_ids, desc=f"Writing {split}", unit="client", disable=None):
        dataset = rows.open(client_id)
        if not isinstance(dataset, Dataset):
            raise TypeError(f"Client {client_id!r} is an IterableDataset, whose rows cannot be stored.")
        if len(dataset) == 0:
            raise ValueError(f"Client {client_id!r} has no rows in the split {split!r}. Leave it out.")
        # One chunk: a scattered selection has a chunk a row, which takes three times as long to write.
        table = embed_table_storage(dataset.with_format("arrow")[:]).combine_chunks()
        table = table.replace_schema_metadata(dataset.features.arrow_schema.metadata)
        (folder / "data" / names[client_id]).mkdir(parents=True, exist_ok=True)
        written[client_id] = (len(dataset), _write_shards(folder, names[client_id], split, table, max_shard_bytes))
    return written


def _write_shards(folder: Path, name: str, split: str, table: pa.Table, max_shard_bytes: int) -> list[StoredFile]:
    num_shards = min(max(1, math.ceil(table.nbytes / max_shard_bytes)), table.num_rows)
    bounds = np.linspace(0, table.num_rows, num_shards + 1).astype(np.int64)
    files = []
    for number in range(num_shards):
        path = f"data/{name}/{split}-{number:05d}-of-{num_shards:05d}.parquet"
        pq.write_table(table[int(bounds[number]) : int(bounds[number + 1])], folder / path)
        files.append(StoredFile.describe(folder, path))
    return files


def _write_index(
    folder: Path, split: str, to_store: SplitToStore, token: bool | str | None
) -> tuple[StoredIndex, dict[str, tuple[int, list[StoredFile]]]]:
    rows = to_store.rows
    if not isinstance(rows, PartitionedDataset):
        raise ValueError(
            "Row numbers can be stored only of one data set that was cut (from_dataset, from_column); here each client"
            " has its own. Store the rows: index_only=False."
        )
    content = content_hash(rows.source)
    if to_store.source is not None:
        _check_content(
            to_store.source.load(token), f"{to_store.source.repo_id} at {to_store.source.revision}", content
        )
    (folder / "index").mkdir(exist_ok=True)
    path = f"index/{split}.parquet"
    numbers = rows.partition.indices.astype(row_number_dtype(len(rows.source)))
    pq.write_table(pa.table({"row": numbers}), folder / path)
    index = StoredIndex(StoredFile.describe(folder, path), len(rows.source), content, to_store.source)
    return index, {i: (int(size), []) for i, size in zip(rows.client_ids, rows.partition.sizes, strict=True)}


def _rows_by_number(
    partition_file: PartitionFile,
    root: Path,
    split: str,
    chosen: Sequence[StoredClient],
    source: Dataset | None,
    token: bool | str | None,
) -> PartitionedDataset:
    index = partition_file.index[split]
    table = pq.read_table(pa.BufferReader(index.file.read(root)))
    if table.column_names != ["row"] or not pa.types.is_integer(table.schema.field("row").type):
        raise PartitionFileError(f"{index.file.path} must hold one column `row` of whole numbers, not {table.schema}.")
    if table["row"].null_count:
        raise PartitionFileError(f"{index.file.path} has a row number that is null.")
    numbers = table["row"].to_numpy()
    everyone = partition_file.clients_of(split)
    offsets = np.cumsum([0, *(client.splits[split].num_rows for client in everyone)], dtype=np.int64)
    if len(numbers) != offsets[-1]:
        raise PartitionFileError(f"{index.file.path} has {len(numbers)} rows; {PARTITION_FILE} says {offsets[-1]}.")
    partition = Partition([client.client_id for client in everyone], numbers, offsets)
    if source is None:
        if index.source is None:
            raise ValueError(
                f"The split {split!r} is stored as row numbers of data that is not on the Hub. Pass those rows:"
                " source=dataset."
            )
        source, name = index.source.load(token), f"{index.source.repo_id} at {index.source.revision}"
    else:
        name = "source="
    _check_content(source, name, index.content)
    partition.check_rows(len(source))
    positions = {client.client_id: position for position, client in enumerate(everyone)}
    return PartitionedDataset(source, partition.select([positions[client.client_id] for client in chosen]))


def _check_content(source: Dataset, name: str, content: str) -> None:
    found = content_hash(source)
    if found != content:
        raise PartitionFileError(
            f"The {len(source)} rows of {name} are not those that were cut: their content is {found}, expected"
            f" {content}. The data changed since, or it was filtered, shuffled or mapped on one side. Cut it anew, or"
            " pass the rows as they were cut."
        )
