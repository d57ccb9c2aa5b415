"""Tables of datasets in memory and of stored federated datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset

from ..._compat import indices_table
from ..client_mapping import ClientMapping
from ..partitioners.base import Partition
from ..storage.folder import open_folder
from .site_table import CLIENT_COLUMN, TRAIN, SiteTable


# Number of rows of a batch.
BATCH_SIZE = 20_000


def dataset_tables(datasets: Any, split: str = TRAIN, site: str | None = "") -> list[SiteTable]:
    """
    The tables of a dataset, or of the datasets of all clients.

    Args:
        datasets (`datasets.Dataset`, [`FederatedDataset`] or `Mapping[str, datasets.Dataset]`): The rows.
        split (`str`, *optional*, defaults to `"train"`): `"train"` or `"test"`.
        site (`str`, *optional*): The site of a single dataset, or `None` if a column has it.

    Raises:
        TypeError: If the rows of a client cannot be read as a `datasets.Dataset`.
    """
    if isinstance(datasets, Dataset):
        return [_dataset_table(datasets, site, split)]
    if isinstance(datasets, ClientMapping):
        if datasets.source is not None and datasets.partition is not None:
            return [_partitioned_table(datasets.source, datasets.partition, split)]
        # A client is opened when it is read, and not kept.
        return [_client_table(datasets, client_id, split) for client_id in datasets]
    if not isinstance(datasets, Mapping):
        raise TypeError(
            f"check_datasets got a {type(datasets).__name__}. Pass a datasets.Dataset, a FederatedDataset, or a"
            " mapping from site to datasets.Dataset."
        )
    return [_dataset_table(rows, str(client_id), split) for client_id, rows in datasets.items()]


def _dataset_table(dataset: Any, site: str | None, split: str) -> SiteTable:
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"check_datasets reads rows of a datasets.Dataset, got a {type(dataset).__name__} of the site {site!r}."
            " Convert it with datasets.Dataset.from_list(rows)."
        )

    names = class_names(dataset.features)
    lines = np.arange(1, len(dataset) + 1)
    return SiteTable("", site, dataset.column_names, lambda: _stored_batches(dataset, lines), split, "row", names)


def _stored_batches(dataset: Dataset, lines: np.ndarray) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
    """
    Read the rows of a dataset in the order in which they are stored, and leave out rows with the line number 0.

    `datasets` reads the rows of a selection or a shuffled dataset one by one, which is 30 times slower.

    Args:
        dataset (`datasets.Dataset`): The rows.
        lines (`np.ndarray` of shape `(num_rows,)`): The line number of each row.
    """
    table, indices = dataset.data.table, indices_table(dataset)
    if indices is not None:
        selected = indices.column(0).to_numpy()
        if len(np.unique(selected)) < len(selected):  # a row that is selected twice has several lines
            table = dataset.flatten_indices().data.table
        else:
            stored = np.zeros(len(table), dtype=np.int64)
            stored[selected] = lines
            lines = stored
    begin = 0
    for rows in table.to_batches(max_chunksize=BATCH_SIZE):
        found = lines[begin : begin + len(rows)]
        begin += len(rows)
        kept = found > 0
        yield (found, rows) if kept.all() else (found[kept], rows.filter(pa.array(kept)))


def _client_table(clients: ClientMapping, client_id: str, split: str) -> SiteTable:
    def batches() -> Iterator[tuple[np.ndarray, pa.RecordBatch | pa.Table]]:
        return _dataset_table(clients[client_id], client_id, split).batches()

    return SiteTable("", client_id, clients.column_names, batches, split, "row", class_names(clients.features or {}))


def _partitioned_table(source: Dataset, partition: Partition, split: str) -> SiteTable:
    """All clients in one table, which reads the source in its order. Line numbers count the rows of each client."""
    # The number of a row of all clients, from 1, determines its client and its line.
    numbers = np.zeros(len(source), dtype=np.int64)
    numbers[partition.indices] = np.arange(1, len(partition.indices) + 1)
    names = pa.array(partition.client_ids, type=pa.string())

    def batches() -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
        for found, rows in _stored_batches(source, numbers):
            owners = np.searchsorted(partition.offsets, found - 1, side="right") - 1
            clients = pa.DictionaryArray.from_arrays(pa.array(owners.astype(np.int32)), names)
            yield found - partition.offsets[owners], rows.append_column(CLIENT_COLUMN, clients)

    return SiteTable("", None, source.column_names, batches, split, "row", class_names(source.features))


def stored_tables(folder: Path, split: str, as_split: str = TRAIN) -> list[SiteTable]:
    """
    The tables of a stored federated dataset: one for each Parquet file.

    Args:
        folder (`Path`): A folder with `partition.json`.
        split (`str`): The split to read.
        as_split (`str`, *optional*, defaults to `"train"`): `"train"` or `"test"`.

    Raises:
        ValueError: If the folder has row numbers in place of rows.
    """
    stored = open_folder(folder)
    if split in stored.index:
        raise ValueError(
            f"{folder} has row numbers in place of rows (--index-only). Check the dataset that was partitioned."
        )
    names = class_names(stored.features)
    return [
        parquet_table(folder / file.path, client.client_id, as_split, names)
        for client in stored.clients_of(split)
        for file in client.splits[split].files
    ]


def parquet_table(path: Path, site: str | None, split: str, label_names: Mapping[str, list[str]]) -> SiteTable:
    """The table of a Parquet file. Its batches have row numbers, from 1."""

    def batches() -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
        begin = 0
        with pq.ParquetFile(path) as file:
            for rows in file.iter_batches(BATCH_SIZE):
                yield np.arange(begin + 1, begin + len(rows) + 1), rows
                begin += len(rows)

    return SiteTable(str(path), site, pq.read_schema(path).names, batches, split, "row", label_names)


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of the labels of each column of labels, or of lists of labels."""
    found = {}
    for name, feature in features.items():
        feature = getattr(feature, "feature", feature)
        if isinstance(feature, ClassLabel):
            found[name] = list(feature.names)
    return found
