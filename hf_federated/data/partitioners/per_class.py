"""Partitioner that splits each class across the clients, so that they differ in their labels and sizes.

The method is from Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural Networks", section 4.
NIID-Bench (Li et al. 2022, "Federated Learning on Non-IID Data Silos") calls it distribution-based label imbalance.
The code of both papers also skips clients that already have an equal share of the examples, which changes the
distribution. This module does not skip clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from ..labels import read_labels_of_splits
from .base import (
    Partition,
    SplitsPartitioner,
    check_enough_rows,
    check_settings,
    check_splits,
    numbered_client_ids,
)
from .dirichlet import assign_rows, draw_shares, split_by_shares


MAX_DRAWS = 10_000


@dataclass(frozen=True)
class PerClassDirichletPartitioner(SplitsPartitioner):
    """
    Partitioner that splits the examples of each class across clients, with shares `p_k ~ Dir(alpha)` for class k.

    The `n_k` examples of class k are shuffled and split at `floor(cumsum(p_k) * n_k)`. All shares are redrawn until
    every client has at least `min_size` examples, at most 10 000 times. Every example is assigned to one client. With
    [`LabelDirichletPartitioner`] clients have equal sizes; here the sizes follow from the draw.

    The column may hold the task of an example instead of its class. A small `alpha` then assigns each task to a single
    client, as in FedDRS (section 5.1). If there are as many clients as tasks, use 1e-12 instead of 1e-6. With 1e-6, a
    draw that gives every client examples may still split a task.

    All splits use the same `p_k`. Classes are matched by their names. A class that is absent from the first split has
    a separate draw. A client without examples in a later split is absent from the partition of that split.

    Args:
        num_clients (`int`):
            Number of clients, at least 1. The clients are named `"0"`, `"1"`, …
        label_column (`str`, *optional*, defaults to `"label"`):
            The column with the labels, as for [`LabelDirichletPartitioner`].
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration. Towards 0, each class belongs to a single client. Above 100, all clients have the same share
            of each class.
        min_size (`int`, *optional*, defaults to `1`):
            Minimum number of examples per client in the first split.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global random generators are neither used nor changed.

    Raises:
        `ValueError`: If no draw gives every client `min_size` examples, if the label column does not exist, or if an
            example has no label.
        `TypeError`: If the column type cannot hold labels.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, PerClassDirichletPartitioner
    >>> dataset = Dataset.from_dict({"task": ["copa", "rte", "wic", "boolq"] * 25})
    >>> whole_tasks = PerClassDirichletPartitioner(num_clients=2, label_column="task", alpha=1e-6)
    >>> clients = FederatedDataset.from_dataset(dataset, whole_tasks)
    >>> set(clients["0"]["task"]) & set(clients["1"]["task"])  # no task is split between the clients
    set()

    ```
    """

    num_clients: int
    label_column: str = "label"
    alpha: float = 1.0
    min_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_settings(self)

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        labels, names = read_labels_of_splits(splits, self.label_column)
        generator = np.random.default_rng(self.seed)
        shares: np.ndarray | None = None
        partitions = {}
        for split, codes in labels.items():
            available = np.bincount(codes, minlength=len(names))
            if shares is None:
                check_enough_rows(self, len(codes), self.num_clients, self.min_size)
                shares = self._draw(generator, available)
            owners = assign_rows(generator, codes, split_by_shares(shares, available[:, None]).T)
            client_ids = numbered_client_ids(self.num_clients)
            partitions[split] = Partition.from_owners(client_ids, owners, drop_empty=True)
        return partitions

    def _draw(self, generator: np.random.Generator, available: np.ndarray) -> np.ndarray:
        """Draw shares that give every client enough rows. Their shape is `(num_labels, num_clients)`."""
        present = np.flatnonzero(available)
        prior = np.ones(self.num_clients)
        shares = np.empty((len(available), self.num_clients))
        largest_minimum = 0
        for _ in range(MAX_DRAWS):
            shares[present] = draw_shares(generator, self.alpha, prior, len(present))
            smallest = int(split_by_shares(shares[present], available[present, None]).sum(axis=0).min())
            if smallest >= self.min_size:
                absent = np.flatnonzero(available == 0)
                # A separate generator, so that the partition of the first split does not depend on the later splits.
                shares[absent] = draw_shares(np.random.default_rng([self.seed, 1]), self.alpha, prior, len(absent))
                return shares
            largest_minimum = max(largest_minimum, smallest)
        raise ValueError(
            f"PerClassDirichletPartitioner: {MAX_DRAWS} draws with alpha={self.alpha} gave no partition in which each"
            f" of {self.num_clients} clients has min_size={self.min_size} rows. In the best draw, the smallest client"
            f" has {largest_minimum}. Increase alpha, or reduce num_clients or min_size. LabelDirichletPartitioner"
            " works for any alpha."
        )
