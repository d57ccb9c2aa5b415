"""Clients that the data name: a speaker, a hospital, the source that a row was collected from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from ..column_values import group_by_value
from .base import Partition, Partitioner, check_column_name, check_splits, check_whole_number


@dataclass(frozen=True)
class NaturalPartitioner(Partitioner):
    """
    Makes a client of each value of a column.

    Clients are named `str(value)` and sorted by value, whatever the order of rows; a client's rows stay in their
    order. Values with fewer than `min_size` rows are left out with their rows, or merged: in the order of values they
    are put together until `min_size` is reached, and then the next client begins. What remains at the end joins the
    last merged client, or the smallest of the others if there is none. A merged client is named after its first value
    and the number of those that joined it, such as `"anna+2 more"`; merged clients come last.

    Which clients there are, and who is merged, is decided on the first split. Values that only a later split has are
    left out of it. A client without rows in a later split is absent from that split's partition.

    Args:
        column (`str`):
            The column that says whose a row is: strings, whole numbers, truth values or dates.
        min_size (`int`, *optional*):
            Rows that every client has at least. Without it, every value is a client.
        max_clients (`int`, *optional*):
            Keep so many clients, those with the most rows (after merging; of equals, those that come first).
        merge_small (`bool`, *optional*, defaults to `False`):
            Merge values with fewer than `min_size` rows instead of leaving them out.

    Raises:
        `ValueError`: If there is no such column, a row has no value in it, or no client has `min_size` rows.
        `TypeError`: If the type of the column does not name things (floats, lists).

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, NaturalPartitioner
    >>> speeches = Dataset.from_dict({"speaker": ["ann", "ben", "cy", "ann", "ann", "dee"]})
    >>> FederatedDataset.from_dataset(speeches, NaturalPartitioner("speaker", min_size=2)).num_rows
    {'ann': 3}
    >>> FederatedDataset.from_dataset(speeches, NaturalPartitioner("speaker", min_size=2, merge_small=True)).num_rows
    {'ann': 3, 'ben+2 more': 3}

    ```
    """

    column: str
    min_size: int | None = None
    max_clients: int | None = None
    merge_small: bool = False

    def __post_init__(self) -> None:
        check_column_name(self, "column")
        for name in ("min_size", "max_clients"):
            if getattr(self, name) is not None:
                check_whole_number(self, name, 1)
        if not isinstance(self.merge_small, bool):
            raise ValueError(f"NaturalPartitioner: merge_small must be True or False, got {self.merge_small!r}.")
        if self.merge_small and self.min_size is None:
            raise ValueError("NaturalPartitioner: merge_small needs min_size, which says what is small.")

    def partition(self, dataset: Dataset) -> Partition:
        return self.partition_splits({"": dataset})[""]

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        client_ids: list[str] = []
        client_of_value: dict[str, int] = {}
        partitions: dict[str, Partition] = {}
        for split, dataset in splits.items():
            values, owners = group_by_value(dataset, self.column)
            if not partitions:
                client_ids, clients = self._choose(values, np.bincount(owners, minlength=len(values)))
                client_of_value = dict(zip(values, clients.tolist(), strict=True))
            clients_here = np.array([client_of_value.get(value, -1) for value in values], dtype=np.int64)
            present = np.unique(clients_here[clients_here >= 0])  # a value is listed only if a row has it
            if len(present) == 0:
                raise ValueError(
                    f"NaturalPartitioner: no row of the split {split!r} belongs to a client of the first one. They"
                    f" share no value of {self.column!r} that is kept."
                )
            positions = np.where(clients_here >= 0, np.searchsorted(present, clients_here), -1)
            partitions[split] = Partition.from_owners([client_ids[client] for client in present], positions[owners])
        return partitions

    def _choose(self, values: list[str], sizes: np.ndarray) -> tuple[list[str], np.ndarray]:
        """The names of the clients, and for each value the position of its client (-1: left out)."""
        if not values:
            raise ValueError(f"The column {self.column!r} has no rows, so there are no clients.")
        minimum = self.min_size or 1
        groups = [[value] for value in np.flatnonzero(sizes >= minimum).tolist()]
        small = np.flatnonzero(sizes < minimum).tolist()
        if self.merge_small:
            groups = _merge(groups, small, sizes, minimum)
        if not groups:
            raise ValueError(
                f"None of the {len(values)} values of {self.column!r} has the {minimum} rows that a client is to have"
                f" at least; the largest has {int(sizes.max())}"
                + (f", and all together have {int(sizes.sum())}." if self.merge_small else ".")
            )
        if self.max_clients is not None:
            totals = np.array([sizes[group].sum() for group in groups])
            kept = np.sort(np.argsort(-totals, kind="stable")[: self.max_clients])
            groups = [groups[position] for position in kept]
        clients = np.full(len(values), -1, dtype=np.int64)
        for position, group in enumerate(groups):
            clients[group] = position
        first = [values[group[0]] for group in groups]
        others = [f"+{len(group) - 1} more" if len(group) > 1 else "" for group in groups]
        return [name + more for name, more in zip(first, others, strict=True)], clients


def _merge(groups: list[list[int]], small: list[int], sizes: np.ndarray, minimum: int) -> list[list[int]]:
    merged: list[list[int]] = []
    current: list[int] = []
    for value in small:
        current.append(value)
        if sizes[current].sum() >= minimum:
            merged.append(current)
            current = []
    if current and merged:
        merged[-1] = merged[-1] + current
    elif current and groups:
        smallest = min(range(len(groups)), key=lambda position: sizes[groups[position]].sum())
        groups = [group + current if position == smallest else group for position, group in enumerate(groups)]
    return groups + merged
