"""The datasets of all clients: one source dataset that is partitioned, or one dataset for each client.

The classes share one interface, so `FederatedDataset` does not depend on how the rows are stored. No class keeps a
reference to the client datasets that it opens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from datasets import Dataset, Features, IterableDataset, concatenate_datasets

from .client_ids import raise_for_empty_clients
from .partitioners.base import Partition
from .row_selection import select_rows


ClientData: TypeAlias = Dataset | IterableDataset


class ClientDatasets(ABC):
    """Interface to the datasets of all clients."""

    client_ids: list[str]

    def __init__(self, client_ids: list[str]) -> None:
        self.client_ids = client_ids
        self.positions = {client_id: position for position, client_id in enumerate(client_ids)}

    @property
    @abstractmethod
    def schema_dataset(self) -> ClientData:
        """A dataset with the columns and features that all clients have."""

    @abstractmethod
    def num_rows(self) -> list[int | None]:
        """Number of rows of each client; `None` if the number is unknown before the rows are read."""

    @abstractmethod
    def open(self, client_id: str) -> ClientData:
        """Return the dataset of one client."""

    @abstractmethod
    def transform(self, function: Callable[[Any], Any], reads_rows: bool = False) -> ClientDatasets:
        """
        Apply a function that keeps the number and the order of rows.

        Args:
            function (`Callable`):
                Takes a dataset and returns the transformed dataset.
            reads_rows (`bool`, *optional*, defaults to `False`):
                Whether the function processes rows, as `map` does. A partitioned source is then first reduced to the
                rows that belong to a client.
        """

    @abstractmethod
    def select(self, client_ids: Sequence[str]) -> ClientDatasets:
        """Return the datasets of some clients, in the given order. The ids exist and are unique."""

    @abstractmethod
    def pooled(self) -> Dataset:
        """Return the rows of all clients in one dataset, in the order of the clients."""


class PartitionedDataset(ClientDatasets):
    """One source dataset and a partition of its row numbers."""

    def __init__(self, source: Dataset, partition: Partition) -> None:
        super().__init__(partition.client_ids)
        self.source = source
        self.partition = partition

    @property
    def schema_dataset(self) -> Dataset:
        return self.source

    def num_rows(self) -> list[int | None]:
        return self.partition.sizes.tolist()

    def open(self, client_id: str) -> Dataset:
        return select_rows(self.source, self.partition.rows(self.positions[client_id]))

    def transform(self, function: Callable[[Any], Any], reads_rows: bool = False) -> PartitionedDataset:
        source, partition = self.source, self.partition
        if reads_rows and len(partition.indices) < len(source):
            # `min_rows` and `select_clients` leave rows without a client; the function does not process these rows
            source = self.pooled()
            indices = np.arange(len(source), dtype=partition.indices.dtype)
            partition = Partition(partition.client_ids, indices, partition.offsets)
        transformed = function(source)
        _check_same_rows(len(source), len(transformed), where="")
        return PartitionedDataset(transformed, partition)

    def select(self, client_ids: Sequence[str]) -> PartitionedDataset:
        return PartitionedDataset(self.source, self.partition.select([self.positions[i] for i in client_ids]))

    def pooled(self) -> Dataset:
        return select_rows(self.source, self.partition.indices)


class SeparateDatasets(ClientDatasets):
    """
    One dataset for each client.

    Args:
        datasets (`Mapping[str, datasets.Dataset or datasets.IterableDataset]`): Client id to dataset.

    Raises:
        `ValueError`: If a client has no rows, or if two clients differ in columns, types or the order of label names.
    """

    def __init__(self, datasets: Mapping[str, ClientData]) -> None:
        raise_for_empty_clients([i for i, rows in datasets.items() if isinstance(rows, Dataset) and len(rows) == 0])
        _check_same_schema(datasets)
        super().__init__(list(datasets))
        self.datasets = dict(datasets)

    @property
    def schema_dataset(self) -> ClientData:
        return self.datasets[self.client_ids[0]]

    def num_rows(self) -> list[int | None]:
        return [len(dataset) if isinstance(dataset, Dataset) else None for dataset in self.datasets.values()]

    def open(self, client_id: str) -> ClientData:
        return self.datasets[client_id]

    def transform(self, function: Callable[[Any], Any], reads_rows: bool = False) -> SeparateDatasets:
        transformed: dict[str, ClientData] = {}
        for client_id, dataset in self.datasets.items():
            transformed[client_id] = function(dataset)
            if isinstance(dataset, Dataset):
                _check_same_rows(len(dataset), len(transformed[client_id]), where=f" of client {client_id!r}")
        return SeparateDatasets(transformed)

    def select(self, client_ids: Sequence[str]) -> SeparateDatasets:
        return SeparateDatasets({client_id: self.datasets[client_id] for client_id in client_ids})

    def pooled(self) -> Dataset:
        return concatenate_datasets([as_dataset(i, rows, "pooled") for i, rows in self.datasets.items()])


def as_dataset(client_id: str, rows: ClientData, purpose: str) -> Dataset:
    """
    Return the rows of a client, whose number is known.

    Args:
        client_id (`str`): The id of the client.
        rows (`datasets.Dataset` or `datasets.IterableDataset`): The rows of the client.
        purpose (`str`): A participle for the error message, such as `"stored"`.

    Raises:
        `TypeError`: If the rows are an `IterableDataset`.
    """
    if isinstance(rows, Dataset):
        return rows
    raise TypeError(
        f"Client {client_id!r} is an IterableDataset, whose rows cannot be {purpose}. Save its rows as a Dataset"
        " first, or leave out the client with select_clients."
    )


def _check_same_schema(datasets: Mapping[str, ClientData]) -> None:
    """
    Check that all clients have the same columns, the same types and the same label names in the same order.

    Two `ClassLabel` features with the same names in a different order would produce wrong labels without an error.

    Raises:
        `ValueError`: If two clients differ. The message names both clients, the column, and the feature of each
            client.
    """
    with_features = {i: dataset.features for i, dataset in datasets.items() if dataset.features is not None}
    if not with_features:
        return
    first_id, first = next(iter(with_features.items()))
    for client_id, features in with_features.items():
        if features == first:
            continue
        missing, extra = sorted(first.keys() - features.keys()), sorted(features.keys() - first.keys())
        if missing or extra:
            raise ValueError(
                f"Clients differ in their columns: compared with {first_id!r}, {client_id!r} lacks {missing} and adds"
                f" {extra}. Remove or add columns until all clients have the same columns."
            )
        _raise_different_feature(first_id, first, client_id, features)


def _raise_different_feature(first_id: str, first: Features, client_id: str, features: Features) -> None:
    for column, feature in features.items():
        if feature != first[column]:
            raise ValueError(
                f"Clients differ in the column {column!r}: {client_id!r} has {feature}, {first_id!r} has"
                f" {first[column]}. Cast the column to one type (and labels to one order of names) with cast_column."
            )


def _check_same_rows(before: int, after: int, where: str) -> None:
    if before != after:
        raise ValueError(
            f"The function changed the number of rows{where} from {before} to {after}, so rows can no longer be"
            " assigned to clients. Map each client separately: FederatedDataset.from_dict({client_id:"
            " clients[client_id].map(...) for client_id in clients}), or change the number of rows before"
            " partitioning."
        )
