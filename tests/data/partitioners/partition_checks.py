"""Simple reference implementations of the statistics that the tests of partitioners compare."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from datasets import Dataset

from hf_federated.data import Partition


def client_rows(partition: Partition) -> dict[str, list[int]]:
    """Return the row indices of each client."""
    return {client_id: partition.rows(i).tolist() for i, client_id in enumerate(partition.client_ids)}


def count_labels(partition: Partition, labels: list[Any]) -> np.ndarray:
    """Count the rows of each label (in sorted order) for each client, of shape `(num_clients, num_labels)`."""
    names = sorted(set(labels))
    counters = [Counter(labels[row] for row in rows) for rows in client_rows(partition).values()]
    return np.array([[counter[name] for name in names] for counter in counters])


def shares(counts: np.ndarray) -> np.ndarray:
    """Divide the counts of each client by their sum."""
    return counts / counts.sum(axis=1, keepdims=True)


def shares_in_splits(
    partitions: dict[str, Partition], splits: dict[str, Dataset], column: str = "label"
) -> list[np.ndarray]:
    """Return the label shares of each client, one array per split."""
    return [shares(count_labels(partitions[name], splits[name][column][:])) for name in splits]


def divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Jensen-Shannon divergence of two distributions, in bits."""
    middle = (first + second) / 2

    def relative_entropy(p: np.ndarray) -> float:
        return sum(a * np.log2(a / m) for a, m in zip(p, middle, strict=True) if a > 0)

    return (relative_entropy(first) + relative_entropy(second)) / 2


def mean_divergence(label_shares: np.ndarray) -> float:
    """Mean divergence over the pairs of every third client."""
    clients = range(0, len(label_shares), 3)
    pairs = [(i, j) for i in clients for j in clients if i < j]
    return float(np.mean([divergence(label_shares[i], label_shares[j]) for i, j in pairs]))


def skewed_labels(num_rows: int, num_labels: int = 20, seed: int = 0) -> list[int]:
    """Draw labels. Each label occurs, and the most frequent label is about ten times as frequent as the rarest."""
    generator = np.random.default_rng(seed)
    weights = np.linspace(1, 10, num_labels)
    drawn = generator.choice(num_labels, num_rows, p=weights / weights.sum())
    drawn[:num_labels] = np.arange(num_labels)
    return drawn.tolist()


def with_labels(labels: list[Any], **columns: list[Any]) -> Dataset:
    return Dataset.from_dict({"label": labels, **columns})
