"""Splits that are stored as row numbers of a source, for data that must not be copied.

A split is valid only for the rows that were partitioned. The content hash of these rows is stored and compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from ..client_datasets import ClientDatasets, PartitionedDataset
from ..partitioners.base import Partition, row_index_dtype
from ..source import DatasetSource, content_hash
from .partition_file import PARTITION_FILE, PartitionFile, PartitionFileError, StoredClient, StoredFile, StoredIndex


def write_row_numbers(
    folder: Path, split: str, rows: ClientDatasets, source: DatasetSource | None, token: bool | str | None
) -> tuple[StoredIndex, dict[str, tuple[int, list[StoredFile]]]]:
    """
    Write the row numbers of a split.

    Args:
        folder (`Path`): The folder of the federated dataset.
        split (`str`): Name of the split.
        rows ([`ClientDatasets`]): The datasets of the clients in the split.
        source ([`DatasetSource`], *optional*): The dataset on the Hub that was partitioned, if known.
        token (`bool` or `str`, *optional*): The token for a source on the Hub.

    Returns:
        `tuple[StoredIndex, dict[str, tuple[int, list[StoredFile]]]]`: The entry of `partition.json` for the split, and
        for each client its number of rows and an empty list of files.

    Raises:
        `ValueError`: If each client has a separate dataset.
        `PartitionFileError`: If the source on the Hub differs from the partitioned rows.
    """
    if not isinstance(rows, PartitionedDataset):
        raise ValueError(
            "Row numbers can be stored only for a partitioned dataset (from_dataset, from_column), but each client"
            " has a separate dataset. Store the rows with index_only=False."
        )
    content = content_hash(rows.source)
    if source is not None:
        loaded = _with_columns(source.load(token), rows.source.features)
        _check_content(loaded, f"{source.repo_id} at {source.revision}", content)
    (folder / "index").mkdir(exist_ok=True)
    path = f"index/{split}.parquet"
    numbers = rows.partition.indices.astype(row_index_dtype(len(rows.source)))
    pq.write_table(pa.table({"row": numbers}), folder / path)
    index = StoredIndex(StoredFile.describe(folder, path), len(rows.source), content, source)
    return index, {i: (int(size), []) for i, size in zip(rows.client_ids, rows.partition.sizes, strict=True)}


def open_row_numbers(
    partition_file: PartitionFile,
    root: Path,
    split: str,
    chosen: Sequence[StoredClient],
    source: Dataset | None,
    token: bool | str | None,
) -> PartitionedDataset:
    """
    Open a split from its row numbers and the rows that were partitioned.

    The other arguments and the errors are those of `open_split` in `folder.py`.

    Args:
        chosen (`Sequence[StoredClient]`): The requested clients, in the requested order.
    """
    index = partition_file.index[split]
    table = pq.read_table(pa.BufferReader(index.file.read(root)))
    if table.column_names != ["row"] or not pa.types.is_integer(table.schema.field("row").type):
        raise PartitionFileError(f"{index.file.path} must have one column `row` of integers, got {table.schema}.")
    if table["row"].null_count:
        raise PartitionFileError(f"{index.file.path} contains a null row number.")
    numbers = table["row"].to_numpy()
    all_clients = partition_file.clients_of(split)
    sizes = [client.splits[split].num_rows for client in all_clients]
    if len(numbers) != sum(sizes):
        raise PartitionFileError(
            f"{index.file.path} has {len(numbers)} rows, but {PARTITION_FILE} lists {sum(sizes)}."
        )
    partition = Partition.from_sizes([client.client_id for client in all_clients], numbers, sizes)
    if source is None:
        if index.source is None:
            raise ValueError(
                f"The split {split!r} is stored as row numbers of data that is not on the Hub. Pass these rows with"
                " source=dataset of load_from_disk. The command line cannot read this dataset."
            )
        source, name = index.source.load(token), f"{index.source.repo_id} at {index.source.revision}"
    else:
        name = "source"
    source = _with_columns(source, partition_file.features)
    _check_content(source, name, index.content)
    partition.check_rows(len(source))
    positions = {client.client_id: position for position, client in enumerate(all_clients)}
    return PartitionedDataset(source, partition.select([positions[client.client_id] for client in chosen]))


def _with_columns(source: Dataset, columns: Iterable[str]) -> Dataset:
    """Drop the columns of a source that the clients do not have, such as the column that names the client of a row."""
    columns = list(columns)
    return source.select_columns(columns) if set(columns) < set(source.column_names) else source


def _check_content(source: Dataset, name: str, content: str) -> None:
    found = content_hash(source)
    if found != content:
        raise PartitionFileError(
            f"The {len(source)} rows of {name} differ from the partitioned rows: their content hash is {found},"
            f" expected {content}. The data was changed, filtered, shuffled or mapped. Partition the data again, or"
            " pass the original rows."
        )
