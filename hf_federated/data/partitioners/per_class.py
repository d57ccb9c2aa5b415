"""Each class split over the clients: they differ in their labels and in their sizes.

Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural Networks", section 4; NIID-Bench (Li et al.
2022, "Federated Learning on Non-IID Data Silos") calls it distribution-based label imbalance. The code of both also
leaves out clients that have their fair share already, which shifts the law; that is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from ..labels import read_labels_of_splits
from .base import (
    Partition,
    Partitioner,
    check_column_name,
    check_concentration,
    check_enough_rows,
    check_splits,
    check_whole_number,
)
from .dirichlet import cut_by_shares, deal_rows, draw_shares


MAX_DRAWS = 10_000


@dataclass(frozen=True)
class PerClassDirichletPartitioner(Partitioner):
    """
    Splits the rows of each class over the clients, by shares `p_k ~ Dir(alpha)` of its own.

    The `n_k` rows of class k are put in random order and cut at `floor(cumsum(p_k) * n_k)`. All shares are drawn again
    until every client has `min_size` rows, at most 10 000 times. Every row is given away once. Beside
    [`LabelDirichletPartitioner`], whose clients have equal sizes, here sizes follow from the draw.

    The column may hold a row's task instead of its class: a small `alpha` then gives each task as a whole to one
    client, as in FedDRS (section 5.1). With as many clients as tasks take 1e-12, not 1e-6: among the draws in which
    every client has rows, those that split a task are then no longer to be expected.

    Splits are cut by the same `p_k`, with classes matched by their names; a class that the first split lacks has a
    draw of its own. A client that gets no rows of a later split is absent from that split's partition.

    Args:
        num_clients (`int`):
            Number of clients, at least 1. They are named `"0"`, `"1"`, …
        label_column (`str`, *optional*, defaults to `"label"`):
            Column with the labels, as for [`LabelDirichletPartitioner`].
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration: towards 0 a class goes to one client as a whole, above 100 all clients have the same share
            of it.
        min_size (`int`, *optional*, defaults to `1`):
            Rows that every client has at least.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global generators are neither read nor changed.

    Raises:
        `ValueError`: If no draw gives every client `min_size` rows, if there is no such column, or if a row has no
            label.
        `TypeError`: If the type of the column does not name classes.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, PerClassDirichletPartitioner
    >>> dataset = Dataset.from_dict({"task": ["copa", "rte", "wic", "boolq"] * 25})
    >>> whole_tasks = PerClassDirichletPartitioner(num_clients=2, label_column="task", alpha=1e-6)
    >>> clients = FederatedDataset.from_dataset(dataset, whole_tasks)
    >>> set(clients["0"]["task"]) & set(clients["1"]["task"])  # no task is on two clients
    set()

    ```
    """

    num_clients: int
    label_column: str = "label"
    alpha: float = 1.0
    min_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number(self, "num_clients", 1)
        check_column_name(self, "label_column")
        check_concentration(self, "alpha")
        check_whole_number(self, "min_size", 1)
        check_whole_number(self, "seed", 0)

    def partition(self, dataset: Dataset) -> Partition:
        return self.partition_splits({"": dataset})[""]

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
            owners = deal_rows(generator, codes, cut_by_shares(shares, available[:, None]).T)
            present = np.flatnonzero(np.bincount(owners, minlength=self.num_clients))
            positions = np.searchsorted(present, np.arange(self.num_clients))
            partitions[split] = Partition.from_owners([str(client) for client in present], positions[owners])
        return partitions

    def _draw(self, generator: np.random.Generator, available: np.ndarray) -> np.ndarray:
        """Shares of each class, of shape `(num_labels, num_clients)`, by which every client has enough rows."""
        occurring = np.flatnonzero(available)
        prior = np.ones(self.num_clients)
        shares = np.empty((len(available), self.num_clients))
        most = 0
        for _ in range(MAX_DRAWS):
            shares[occurring] = draw_shares(generator, self.alpha, prior, len(occurring))
            smallest = int(cut_by_shares(shares[occurring], available[occurring, None]).sum(axis=0).min())
            if smallest >= self.min_size:
                lacking = np.flatnonzero(available == 0)
                # By a generator of its own, so that the first split is cut as if it were alone.
                shares[lacking] = draw_shares(np.random.default_rng([self.seed, 1]), self.alpha, prior, len(lacking))
                return shares
            most = max(most, smallest)
        raise ValueError(
            f"PerClassDirichletPartitioner: {MAX_DRAWS} draws with alpha={self.alpha} gave no partition in which each"
            f" of {self.num_clients} clients has min_size={self.min_size} rows; the best left one with {most}. Raise"
            " alpha, or ask for fewer clients or a smaller min_size; LabelDirichletPartitioner reaches any alpha."
        )
