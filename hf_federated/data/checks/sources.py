"""Tables of datasets in memory and of stored federated datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset

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

    def batches() -> Iterator[tuple[np.ndarray, pa.Table]]:
        begin = 0
        for rows in dataset.with_format("arrow").iter(BATCH_SIZE):
            yield np.arange(begin + 1, begin + len(rows) + 1), rows
            begin += len(rows)

    features = dataset.features
    return SiteTable("", site, dataset.column_names, batches, split, "row", class_names(features))


def _client_table(clients: ClientMapping, client_id: str, split: str) -> SiteTable:
    def batches() -> Iterator[tuple[np.ndarray, pa.Table]]:
        return _dataset_table(clients[client_id], client_id, split).batches()

    return SiteTable("", client_id, clients.column_names, batches, split, "row", class_names(clients.features or {}))


def _partitioned_table(source: Dataset, partition: Partition, split: str) -> SiteTable:
    """All clients in one table, which reads the source in its order. Line numbers count the rows of each client."""
    owners = np.full(len(source), -1)
    owners[partition.indices] = np.repeat(np.arange(len(partition)), partition.sizes)
    lines = np.zeros(len(source), dtype=np.int64)
    lines[partition.indices] = np.arange(len(partition.indices)) - np.repeat(partition.offsets[:-1], partition.sizes)
    names = pa.array(partition.client_ids, type=pa.string())

    def batches() -> Iterator[tuple[np.ndarray, pa.Table]]:
        begin = 0
        for rows in source.with_format("arrow").iter(BATCH_SIZE):
            part = slice(begin, begin + len(rows))
            begin += len(rows)
            owned = owners[part] >= 0
            if not owned.all():
                rows = rows.filter(pa.array(owned))
            clients = pa.DictionaryArray.from_arrays(pa.array(owners[part][owned].astype(np.int32)), names)
            yield lines[part][owned] + 1, rows.append_column(CLIENT_COLUMN, clients)

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
