"""A federated dataset as a folder: parquet files, `partition.json` and a dataset card.

A push to the Hub commits the same folder. The folder is written to a temporary directory next to its target and then
renamed, so the target is never incomplete. This module handles only rows and files; `FederatedDataset` and
`FederatedDatasetDict` use it.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from datasets.table import embed_table_storage
from datasets.utils.py_utils import convert_file_size_to_int
from huggingface_hub.utils import tqdm

from ...utils.client_names import escape_client_ids
from ..client_datasets import ClientDatasets, as_dataset
from ..client_ids import check_known, check_requested_clients
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
from .row_numbers import open_row_numbers, write_row_numbers


if TYPE_CHECKING:
    from ..client_mapping import ClientMapping
    from ..statistics.label_statistics import LabelCounts

# Generated files, in addition to the data files and `partition.json`.
README = "README.md"
PICTURES = {name: f"pictures/{name}.png" for name in ("sizes", "labels", "divergence")}
GENERATED = (README, *PICTURES.values())


@dataclass(frozen=True)
class StorageOptions:
    """
    Options of the written files, which a folder and a push have in common.

    Args:
        label_column (`str`, *optional*): The column whose label counts are published.
        index_only (`bool`): Whether row numbers are written instead of rows.
        max_shard_size (`int` or `str`): Approximate size in memory of the rows in one file.
    """

    label_column: str | None
    index_only: bool
    max_shard_size: int | str


def write_files(
    folder: Path,
    splits: Mapping[str, ClientMapping],
    options: StorageOptions,
    label_counts: Mapping[str, LabelCounts] | None = None,
    token: bool | str | None = None,
) -> PartitionFile:
    """
    Write the data files and `partition.json` into an empty folder.

    Args:
        folder (`Path`):
            An empty folder.
        splits (`Mapping[str, ClientMapping]`):
            The clients of each split.
        options ([`StorageOptions`]):
            The files to write.
        label_counts (`Mapping[str, LabelCounts]`, *optional*):
            Label counts to publish for each split, with the same labels in all splits.
        token (`bool` or `str`, *optional*):
            The token for a source on the Hub. The source is compared with the partitioned rows.

    Raises:
        `ValueError`: If a split name is invalid, or if splits differ in their columns.
        `TypeError`: If a client is an `IterableDataset`.
    """
    _check_splits(splits)
    max_bytes = _bytes(options.max_shard_size)
    ids = list(dict.fromkeys(client_id for clients in splits.values() for client_id in clients))
    names = escape_client_ids(ids)
    stored: dict[str, dict[str, StoredRows]] = {client_id: {} for client_id in ids}
    index: dict[str, StoredIndex] = {}
    for split, clients in splits.items():
        if options.index_only:
            index[split], rows_of = write_row_numbers(folder, split, clients.rows, clients.origin, token)
        else:
            rows_of = _write_clients(folder, split, clients.rows, names, max_bytes)
        for position, (client_id, (num_rows, files)) in enumerate(rows_of.items()):
            counts = None if label_counts is None else label_counts[split].counts[position].tolist()
            stored[client_id][split] = StoredRows(num_rows, files, counts)
    partition_file = PartitionFile(
        splits=list(splits),
        features=next(iter(splits.values())).features,
        clients=[StoredClient(client_id, names[client_id], stored[client_id]) for client_id in ids],
        partitioning={split: clients.partitioning for split, clients in splits.items()},
        sources={split: clients.origin for split, clients in splits.items() if clients.origin is not None},
        index=index,
        label_column=options.label_column,
        label_names=None if label_counts is None else next(iter(label_counts.values())).label_names,
    )
    (folder / PARTITION_FILE).write_text(partition_file.to_json(), encoding="utf-8")
    return partition_file


def save_folder(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """
    Write a folder and move it to its target when it is complete.

    An existing federated dataset at the target is replaced. Any other content is not replaced.

    If the process is killed between the last two steps, which are renames, both versions remain next to the target,
    and the error on the next load names their location.

    Args:
        path (`str`): The target folder.
        write (`Callable[[Path], object]`): Writes the content into an empty folder.

    Raises:
        `FileExistsError`: If the target contains other files than those of a federated dataset.
        `ValueError`: If the target is or contains the current directory.
    """
    target = Path(path).resolve()
    check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    new, old = temporary / "new", temporary / "old"
    try:
        new.mkdir()
        write(new)
        if target.exists():
            _move_aside(target, old)
        try:
            os.rename(new, target)
        except BaseException:
            if old.exists():
                os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        with suppress(OSError):
            temporary.rmdir()  # not empty if the old version could not be restored; `open_folder` reports its location


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """
    Check that a folder is new, empty, or a federated dataset that a save may replace.

    Args:
        path (`str`): The target folder.

    Raises:
        `FileExistsError`: If the target contains other files than those of a federated dataset.
        `ValueError`: If the target is or contains the current directory.
    """
    target = Path(path).resolve()
    if target in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(
            f"{target} is or contains the current directory, which would be replaced. Save to another folder."
        )
    foreign = _foreign_file(target)
    if foreign is not None:
        raise FileExistsError(
            f"{target} is or contains something else than a federated dataset ({foreign}), which would be replaced."
            " Choose another folder, or remove the content first."
        )


def _move_aside(target: Path, old: Path) -> None:
    try:
        os.rename(target, old)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{error.strerror}; a mount point cannot be replaced, so save to a folder inside it",
            str(target),
        ) from error


def _foreign_file(target: Path) -> str | None:
    """Return a file in a folder that does not belong to a federated dataset, or `None` if there is no such file."""
    if target.exists() and not target.is_dir():
        return target.name
    existing = {path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()}
    try:
        stored = PartitionFile.read(target)
    except (FileNotFoundError, PartitionFileError):
        return min(existing, default=None)
    return min(existing - {PARTITION_FILE, *GENERATED, *(file.path for file in stored.files())}, default=None)


def open_folder(path: str | os.PathLike[str]) -> PartitionFile:
    """
    Read the `partition.json` of a folder.

    Raises:
        `FileNotFoundError`: If the folder does not contain a federated dataset. If a save was killed between its last
            two steps, the message contains the location of the dataset.
        `PartitionFileError`: If `partition.json` is invalid.
    """
    target = Path(path).absolute()
    try:
        return PartitionFile.read(target)
    except FileNotFoundError as error:
        left = sorted(target.parent.glob(f".{glob.escape(target.name)}-*/old/{PARTITION_FILE}"))
        if not left:
            raise
        raise FileNotFoundError(
            f"{target} does not exist, because a save was killed at its last step. The previous version is in"
            f" {left[-1].parent}; move it back."
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
    Open the rows of one split from the files in a folder.

    Args:
        partition_file ([`PartitionFile`]): The content of the `partition.json` of the folder.
        root (`Path`): The folder. It must contain the files of the requested clients.
        split (`str`): The split.
        clients (`Sequence[str]`, *optional*): Ids of the clients to open, in this order. Defaults to all clients of
            the split.
        source (`datasets.Dataset`, *optional*): The rows that were partitioned, if only row numbers are stored.
        token (`bool` or `str`, *optional*): The token for a source on the Hub.

    Raises:
        `PartitionFileError`: If a file is missing or was changed, or if `source` has different rows.
        `ValueError`: If the split does not exist.
        `KeyError`: If a client does not exist, or if it has no rows in the split.
    """
    root = root.absolute()  # the current directory may change before a client is opened
    chosen = choose_clients(partition_file, split, clients)
    if split in partition_file.index:
        return open_row_numbers(partition_file, root, split, chosen, source, token)
    if source is not None:
        raise ValueError(f"The split {split!r} is stored with its rows. Remove the argument source.")
    stored = {client.client_id: client.splits[split] for client in chosen}
    rows = ParquetDatasets(root, partition_file.features, stored)
    rows.check()
    return rows


def choose_clients(partition_file: PartitionFile, split: str, clients: Sequence[str] | None) -> list[StoredClient]:
    """Return the requested clients of a split, in the requested order. Errors as in [`open_split`]."""
    if split not in partition_file.splits:
        raise ValueError(f"There is no split {split!r}. The splits are: {', '.join(partition_file.splits)}.")
    available = {client.client_id: client for client in partition_file.clients_of(split)}
    if clients is None:
        return list(available.values())
    check_requested_clients(clients)
    check_known(clients, available, f" in the split {split!r}")
    return [available[client_id] for client_id in clients]


def _check_splits(splits: Mapping[str, ClientMapping]) -> None:
    if not splits:
        raise ValueError("There is no split to store. Pass at least one split.")
    (first_name, first), *remaining = splits.items()
    check_split_name(first_name)
    for name, split in remaining:
        check_split_name(name)
        if split.features != first.features:
            raise ValueError(
                f"The splits {first_name!r} and {name!r} differ in their columns, types or label names:"
                f" {first.features} and {split.features}. Cast both splits to"
                " the same features."
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
                " The settings() of the partitioner must return numbers, strings, booleans and lists of these types."
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
    # `disable=None` hides the progress bar if the output is not a terminal
    for client_id in tqdm(rows.client_ids, desc=f"Writing {split}", unit="client", disable=None):
        dataset = as_dataset(client_id, rows.open(client_id), "stored")
        # A scattered selection has one chunk per row. Writing a single chunk is three times faster.
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
