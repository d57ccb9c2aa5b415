"""The datasets of all clients: one source dataset that is partitioned, or one dataset for each client.

The classes share one interface, so `FederatedDataset` does not depend on how the rows are stored. No class keeps a
reference to the client datasets that it opens. `torch_datasets.py` describes clients with a dataset of torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    are_progress_bars_disabled,
    concatenate_datasets,
    disable_progress_bars,
    enable_progress_bars,
)
from datasets.utils import tqdm

from .client_ids import raise_for_empty_clients
from .partitioners.base import Partition
from .row_selection import kept_rows, select_rows
from .torch_datasets import TorchDataset, is_map_style, is_stream, kind_of, subset


ClientData: TypeAlias = Dataset | IterableDataset | TorchDataset


class ClientDatasets(ABC):
    """
    Interface to the datasets of all clients.

    Args:
        client_ids (`list[str]`): The ids of the clients.
        features (`Features`, *optional*): The types of the columns that all clients have; `None` if they are unknown
            before rows are read.
    """

    def __init__(self, client_ids: list[str], features: Features | None) -> None:
        self.client_ids = client_ids
        self.features = features
        self.positions = {client_id: position for position, client_id in enumerate(client_ids)}

    @property
    def column_names(self) -> list[str]:
        """The columns that all clients have. Empty if they are unknown before rows are read."""
        return list(self.features or ())

    @abstractmethod
    def num_rows(self) -> list[int | None]:
        """Number of rows of each client; `None` if the number is unknown before the rows are read."""

    @abstractmethod
    def open(self, client_id: str) -> ClientData:
        """Return the dataset of one client."""

    @abstractmethod
    def transform(self, function: Callable[[Any], Any], label: str | None = None) -> ClientDatasets:
        """
        Apply a function that keeps the number and the order of rows.

        Args:
            function (`Callable`):
                Takes a dataset and returns the transformed dataset.
            label (`str`, *optional*):
                Label of the progress bar, if the function processes rows, as `map` does. A partitioned source is then
                first reduced to the rows that belong to a client.
        """

    @abstractmethod
    def filter(self, function: Callable[..., Any] | None, **kwargs: Any) -> tuple[ClientDatasets, list[str]]:
        """
        Keep the rows for which a function is true. The arguments are those of `datasets.Dataset.filter`.

        Returns:
            `tuple[ClientDatasets, list[str]]`: The clients that still have rows, and the ids of the other clients.
        """

    @abstractmethod
    def take(self, rows: Mapping[str, np.ndarray]) -> ClientDatasets:
        """
        Return the datasets of some clients with some of their rows.

        Args:
            rows (`Mapping[str, np.ndarray]`): For each client, the positions of its rows, in the wanted order.

        Raises:
            `TypeError`: If a client is a stream, whose rows have no positions.
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
        super().__init__(partition.client_ids, source.features)
        self.source = source
        self.partition = partition

    def num_rows(self) -> list[int | None]:
        return self.partition.sizes.tolist()

    def open(self, client_id: str) -> Dataset:
        return select_rows(self.source, self.partition.rows(self.positions[client_id]))

    def transform(self, function: Callable[[Any], Any], label: str | None = None) -> PartitionedDataset:
        source, partition = self.source, self.partition
        if label is not None and len(partition.indices) < len(source):
            # `min_rows` and `select_clients` leave rows without a client; the function does not process these rows
            source = self.pooled()
            indices = np.arange(len(source), dtype=partition.indices.dtype)
            partition = Partition(partition.client_ids, indices, partition.offsets)
        transformed = function(source)
        _check_same_rows(len(source), len(transformed), where="")
        return PartitionedDataset(transformed, partition)

    def filter(self, function: Callable[..., Any] | None, **kwargs: Any) -> tuple[PartitionedDataset, list[str]]:
        kept = kept_rows(self.pooled(), function, **kwargs)
        bounds = np.searchsorted(kept, self.partition.offsets)
        sizes = np.diff(bounds)
        left = [client_id for client_id, size in zip(self.client_ids, sizes, strict=True) if size]
        empty = [client_id for client_id, size in zip(self.client_ids, sizes, strict=True) if not size]
        partition = Partition.from_sizes(left, self.partition.indices[kept], sizes[sizes > 0])
        return PartitionedDataset(self.source, partition), empty

    def take(self, rows: Mapping[str, np.ndarray]) -> PartitionedDataset:
        pieces = [self.partition.rows(self.positions[client_id])[taken] for client_id, taken in rows.items()]
        return PartitionedDataset(self.source, Partition.from_rows(list(rows), pieces))

    def select(self, client_ids: Sequence[str]) -> PartitionedDataset:
        return PartitionedDataset(self.source, self.partition.select([self.positions[i] for i in client_ids]))

    def pooled(self) -> Dataset:
        return select_rows(self.source, self.partition.indices)


class SeparateDatasets(ClientDatasets):
    """
    One dataset for each client.

    Args:
        datasets (`Mapping[str, Any]`): Client id to dataset: a `datasets.Dataset`, a `datasets.IterableDataset` or a
            `torch.utils.data.Dataset`.

    Raises:
        `ValueError`: If a client has no rows, or if two clients differ in columns, types or the order of label names.
    """

    def __init__(self, datasets: Mapping[str, ClientData]) -> None:
        raise_for_empty_clients([i for i, rows in datasets.items() if not is_stream(rows) and len(rows) == 0])
        super().__init__(list(datasets), _shared_features(datasets))
        self.datasets = dict(datasets)

    def num_rows(self) -> list[int | None]:
        return [None if is_stream(dataset) else len(dataset) for dataset in self.datasets.values()]

    def open(self, client_id: str) -> ClientData:
        return self.datasets[client_id]

    def transform(self, function: Callable[[Any], Any], label: str | None = None) -> SeparateDatasets:
        transformed: dict[str, ClientData] = {}
        for client_id, dataset in self._with_progress(label):
            transformed[client_id] = function(dataset)
            if isinstance(dataset, Dataset):
                _check_same_rows(len(dataset), len(transformed[client_id]), where=f" of client {client_id!r}")
        return SeparateDatasets(transformed)

    def filter(self, function: Callable[..., Any] | None, **kwargs: Any) -> tuple[SeparateDatasets, list[str]]:
        clients = self._with_progress(kwargs.get("desc") or "Filter")
        filtered = {client_id: dataset.filter(function, **kwargs) for client_id, dataset in clients}
        empty = [client_id for client_id, rows in filtered.items() if isinstance(rows, Dataset) and not len(rows)]
        return SeparateDatasets({i: rows for i, rows in filtered.items() if i not in set(empty)}), empty

    def take(self, rows: Mapping[str, np.ndarray]) -> SeparateDatasets:
        taken: dict[str, ClientData] = {}
        for client_id, positions in rows.items():
            dataset = self.datasets[client_id]
            taken[client_id] = (
                subset(dataset, positions)
                if is_map_style(dataset)
                else select_rows(as_dataset(client_id, dataset, "selected"), positions)
            )
        return SeparateDatasets(taken)

    def select(self, client_ids: Sequence[str]) -> SeparateDatasets:
        return SeparateDatasets({client_id: self.datasets[client_id] for client_id in client_ids})

    def pooled(self) -> Dataset:
        return concatenate_datasets([as_dataset(i, rows, "pooled") for i, rows in self.datasets.items()])

    def _with_progress(self, label: str | None) -> Iterator[tuple[str, Any]]:
        """Iterate over the clients, with one progress bar if rows are processed (`label`)."""
        for client_id, dataset in self.datasets.items():
            if is_map_style(dataset) or not isinstance(dataset, (Dataset, IterableDataset)):
                raise TypeError(
                    f"Client {client_id!r} is a {kind_of(dataset)}, which has no columns to transform. Transform the"
                    " examples in its `__getitem__` or `__iter__`, or pass a datasets.Dataset"
                    " (Dataset.from_list, Dataset.from_generator)."
                )
        num_datasets = sum(isinstance(dataset, Dataset) for dataset in self.datasets.values())
        if label is None or num_datasets < 2:
            return iter(self.datasets.items())
        return _one_progress_bar(self.datasets, label)


def _one_progress_bar(datasets: Mapping[str, ClientData], label: str) -> Iterator[tuple[str, ClientData]]:
    """Iterate over clients with one progress bar, and without the bars that `datasets` shows for each client."""
    for item in tqdm(datasets.items(), desc=label, unit="client"):
        were_disabled = are_progress_bars_disabled()
        disable_progress_bars()
        try:
            yield item
        finally:
            if not were_disabled:
                enable_progress_bars()


def as_dataset(client_id: str, rows: ClientData, purpose: str) -> Dataset:
    """
    Return the rows of a client, whose number and columns are known.

    Args:
        client_id (`str`): The id of the client.
        rows (`Any`): The dataset of the client.
        purpose (`str`): A participle for the error message, such as `"stored"`.

    Raises:
        `TypeError`: If the rows are an `IterableDataset` or a dataset of torch.
    """
    if isinstance(rows, Dataset):
        return rows
    raise TypeError(
        f"Client {client_id!r} is {'an' if isinstance(rows, IterableDataset) else 'a'} {kind_of(rows)}, whose rows"
        f" cannot be {purpose}. Save its rows as a Dataset first, or leave out the client with select_clients."
    )


def _shared_features(datasets: Mapping[str, ClientData]) -> Features | None:
    """
    Return the columns of all clients: the same columns, types and label names in the same order.

    Two `ClassLabel` features with the same names in a different order would produce wrong labels without an error.

    Returns:
        `Features`, *optional*: `None` if the columns of a client are unknown before its rows are read.

    Raises:
        `ValueError`: If two clients differ. The message names both clients, the column, and the feature of each
            client.
    """
    with_features = {
        client_id: dataset.features
        for client_id, dataset in datasets.items()
        if isinstance(dataset, (Dataset, IterableDataset)) and dataset.features is not None
    }
    if not with_features:
        return None
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
        column = next(name for name in features if features[name] != first[name])
        raise ValueError(
            f"Clients differ in the column {column!r}: {client_id!r} has {features[column]}, {first_id!r} has"
            f" {first[column]}. Cast the column to one type (and labels to one order of names) with cast_column."
        )
    return first if len(with_features) == len(datasets) else None


def _check_same_rows(before: int, after: int, where: str) -> None:
    if before != after:
        raise ValueError(
            f"The function changed the number of rows{where} from {before} to {after}, so rows can no longer be"
            " assigned to clients. Map each client separately with map(..., by_client=True), or change the number of"
            " rows before partitioning."
        )
