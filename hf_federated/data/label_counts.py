"""How many rows of each label each client has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from datasets import ClassLabel, Dataset

from .client_rows import ClientRows, PartitionedRows
from .labels import read_labels


def count_labels(splits: Mapping[str, ClientRows], column: str) -> tuple[list[str], dict[str, np.ndarray]]:
    """
    Counts a label column over clients, without opening them where one data set was cut.

    Args:
        splits (`Mapping[str, ClientRows]`): Rows by split.
        column (`str`): A column that [`read_labels`] takes.

    Returns:
        `tuple[list[str], dict[str, np.ndarray]]`: The labels of all splits: the names of a `ClassLabel`, otherwise the
        values that occur, sorted as text. And for each split the counts, `int64` of shape `(num_clients, num_labels)`.

    Raises:
        `ValueError`, `TypeError`: As [`read_labels`]; `TypeError` if a client is an `IterableDataset`.
    """
    counted = {split: _count_split(rows, column) for split, rows in splits.items()}
    feature = next(iter(splits.values())).example.features[column]
    found = dict.fromkeys(name for names, _ in counted.values() for name in names)
    names = list(found) if isinstance(feature, ClassLabel) else sorted(found)
    return names, {split: _reorder(counts, own, names) for split, (own, counts) in counted.items()}


def _count_split(rows: ClientRows, column: str) -> tuple[list[str], np.ndarray]:
    if isinstance(rows, PartitionedRows):
        codes, names = read_labels(rows.source, column)
        owners = np.repeat(np.arange(len(rows.client_ids)), rows.partition.sizes)
        cells = owners * len(names) + codes[rows.partition.indices]
        counts = np.bincount(cells, minlength=len(rows.client_ids) * len(names))
        return names, counts.reshape(len(rows.client_ids), len(names))
    clients = []
    for client_id in rows.client_ids:
        dataset = rows.open(client_id)
        if not isinstance(dataset, Dataset):
            raise TypeError(f"Client {client_id!r} is an IterableDataset, whose labels cannot be counted.")
        codes, names = read_labels(dataset, column)
        clients.append((names, np.bincount(codes, minlength=len(names))))
    everything = list(dict.fromkeys(name for names, _ in clients for name in names))
    return everything, np.stack([_reorder(counts[None], names, everything)[0] for names, counts in clients])


def _reorder(counts: np.ndarray, names: list[str], wanted: list[str]) -> np.ndarray:
    position = {name: column for column, name in enumerate(wanted)}
    reordered = np.zeros((len(counts), len(wanted)), dtype=np.int64)
    reordered[:, [position[name] for name in names]] = counts
    return reordered
