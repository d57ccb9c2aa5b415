"""Nested partitioning, for example by domain and then by label, or by hospital and then by ward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from ..row_selection import select_rows
from .base import Partition, Partitioner, SplitsPartitioner, check_splits


@dataclass(frozen=True)
class NestedPartitioner(SplitsPartitioner):
    """
    Partitioner that splits a dataset into groups, and each group into clients.

    A client is named `"<group>/<client>"`. The inner partitioner has a different seed in each group, derived from its
    seed and the name of the group. Therefore groups differ, and the clients of a group stay the same when other groups
    change. Examples that the outer partitioner assigns to no group belong to no client.

    With several splits, the outer partitioner determines the groups of all splits. Within a group, the inner
    partitioner receives the examples of the group in every split. A group that is absent from a later split has no
    clients in that split.

    Args:
        outer ([`Partitioner`]): The partitioner that creates the groups.
        inner ([`Partitioner`]): The partitioner that creates the clients of a group.

    Raises:
        `ValueError`: If a group cannot be partitioned. The message names the group.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, LabelDirichletPartitioner, NaturalPartitioner, NestedPartitioner
    >>> reviews = Dataset.from_dict({"domain": ["baby", "sport"] * 20, "label": [0, 1, 1, 0] * 10})
    >>> partitioner = NestedPartitioner(NaturalPartitioner("domain"), LabelDirichletPartitioner(2, alpha=0.5))
    >>> FederatedDataset.from_dataset(reviews, partitioner).num_rows
    {'baby/0': 10, 'baby/1': 10, 'sport/0': 10, 'sport/1': 10}

    ```
    """

    outer: Partitioner
    inner: Partitioner

    def __post_init__(self) -> None:
        for name in ("outer", "inner"):
            if not isinstance(getattr(self, name), Partitioner):
                raise ValueError(f"NestedPartitioner: {name} must be a Partitioner, got {getattr(self, name)!r}.")

    @property
    def naming_columns(self) -> list[str]:
        return [*self.outer.naming_columns, *self.inner.naming_columns]

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        groups = {
            split: {group: partition.rows(position) for position, group in enumerate(partition.client_ids)}
            for split, partition in self.outer.partition_splits(splits).items()
        }
        client_ids: dict[str, list[str]] = {split: [] for split in splits}
        pieces: dict[str, list[np.ndarray]] = {split: [] for split in splits}
        for group in groups[next(iter(splits))]:
            rows = {split: rows_of[group] for split, rows_of in groups.items() if group in rows_of}
            for split, partition in self._partition_group(group, splits, rows).items():
                client_ids[split] += [f"{group}/{client_id}" for client_id in partition.client_ids]
                pieces[split] += [rows[split][partition.rows(client)] for client in range(len(partition))]
        return {split: Partition.from_rows(client_ids[split], pieces[split]) for split in splits}

    def _partition_group(
        self, group: str, splits: Mapping[str, Dataset], rows: Mapping[str, np.ndarray]
    ) -> dict[str, Partition]:
        parts = {split: select_rows(splits[split], numbers) for split, numbers in rows.items()}
        try:
            return self.inner.reseeded(group).partition_splits(parts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"NestedPartitioner: cannot partition the group {group!r}. {error}") from error
