"""Clients given by a column of the data, for example the speaker, the hospital or the source of an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from transformers.utils import logging

from ..client_ids import find_look_alikes
from ..column_values import group_by_value
from .base import Partition, SplitsPartitioner, check_settings, check_splits


logger = logging.get_logger(__name__)

# Number of groups of similar names in a warning, and of names in a group.
MAX_SHOWN = 5


@dataclass(frozen=True)
class NaturalPartitioner(SplitsPartitioner):
    """
    Partitioner that creates one client for each value of a column.

    Clients are named `str(value)` and sorted by value, independent of the order of the rows. The examples of a client
    keep their order. Values with fewer than `min_size` examples are dropped together with their examples, or merged.
    Values are merged in sorted order: values are added to a client until it has `min_size` examples, and the next
    value starts a new client. If too few examples remain at the end, they join the last merged client, or the smallest
    other client if there is no merged client. A merged client is named after its first value and the number of
    additional values, such as `"anna+2 more"`. Merged clients are last.

    The first split determines the clients and the merged values. Values that are absent from the first split are
    dropped from later splits. A client without examples in a later split is absent from the partition of that split.

    [`FederatedDataset.from_dataset`] drops the column, because the name of a client is no feature of its examples.
    `keep_column=True` keeps the column. A column that is the only column of the dataset is kept.

    Args:
        column (`str`):
            The column that identifies the client of an example. It holds strings, integers, booleans or dates.
        min_size (`int`, *optional*):
            Minimum number of examples per client in the first split. If `None`, every value is a client.
        max_clients (`int`, *optional*):
            Maximum number of clients. The clients with the most examples are kept, counted after merging. Among
            clients of equal size, the first clients are kept.
        merge_small (`bool`, *optional*, defaults to `False`):
            Whether to merge values with fewer than `min_size` examples instead of dropping them.
        keep_column (`bool`, *optional*, defaults to `False`):
            Whether the examples of the clients keep the column.

    Raises:
        `ValueError`: If the column does not exist, an example has no value in it, or no client has `min_size`
            examples.
        `TypeError`: If the column type cannot identify clients (floats, lists).

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
    keep_column: bool = False

    def __post_init__(self) -> None:
        check_settings(self)
        if self.merge_small and self.min_size is None:
            raise ValueError("NaturalPartitioner: merge_small=True needs min_size. Set min_size to a number of rows.")

    @property
    def naming_columns(self) -> list[str]:
        return [] if self.keep_column else [self.column]

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
            split_clients = np.array([client_of_value.get(value, -1) for value in values], dtype=np.int64)
            if (split_clients < 0).all():
                raise ValueError(
                    f"NaturalPartitioner: no row of the split {split!r} belongs to a client of the first split. Check"
                    f" that the column {self.column!r} has the same values in both splits."
                )
            partitions[split] = Partition.from_owners(client_ids, split_clients[owners], drop_empty=True)
        return partitions

    def _choose(self, values: list[str], sizes: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Return the client ids and, for each value, the position of its client (-1 if the value is dropped)."""
        if not values:
            raise ValueError(
                f"The column {self.column!r} has no rows, so there are no clients. Pass at least one row."
            )
        if look_alikes := find_look_alikes(values):
            shown = "; ".join(", ".join(map(repr, names[:MAX_SHOWN])) for names in look_alikes[:MAX_SHOWN])
            more = f"; and {len(look_alikes) - MAX_SHOWN} more groups" if len(look_alikes) > MAX_SHOWN else ""
            logger.warning(
                f"These values of the column {self.column!r} differ in case, whitespace or invisible characters only: "
                f"{shown}{more}. Each value is a separate client. Correct the values if they name the same client."
            )
        minimum = self.min_size or 1
        groups = [[value] for value in np.flatnonzero(sizes >= minimum).tolist()]
        small = np.flatnonzero(sizes < minimum).tolist()
        if self.merge_small:
            groups = _merge(groups, small, sizes, minimum)
        if not groups:
            raise ValueError(
                f"None of the {len(values)} values of {self.column!r} has at least {minimum} rows. The largest has"
                f" {int(sizes.max())}"
                + (f", and all values together have {int(sizes.sum())}" if self.merge_small else "")
                + ". Lower the minimum."
            )
        if self.max_clients is not None:
            totals = np.array([sizes[group].sum() for group in groups])
            kept = np.sort(np.argsort(-totals, kind="stable")[: self.max_clients])
            groups = [groups[position] for position in kept]
        clients = np.full(len(values), -1, dtype=np.int64)
        for position, group in enumerate(groups):
            clients[group] = position
        suffixes = [f"+{len(group) - 1} more" if len(group) > 1 else "" for group in groups]
        return [values[group[0]] + suffix for group, suffix in zip(groups, suffixes, strict=True)], clients


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
