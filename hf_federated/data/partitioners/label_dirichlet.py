"""Clients that share a size and differ in their labels (FedNLP, Lin et al. 2022, section 3.2).

The other common scheme, in which each class is split over the clients, is `PerClassDirichletPartitioner`.
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
    number_clients,
)
from .dirichlet import deal_rows, draw_shares
from .quantity import quantity_sizes


@dataclass(frozen=True)
class LabelDirichletPartitioner(Partitioner):
    """
    Gives every client the same number of rows, with shares of labels of its own.

    The labels of client j follow `q_j ~ Dir(alpha * p)`, where p are the labels' shares of the whole. Its rows are
    drawn by `q_j` without replacement. Where a label runs out, *dynamic re-assignment* fills the gap from the labels
    that are left, in proportion to what is left of each. So no row is lost and no client is dropped, however small
    `alpha` is; the last clients get what the others left.

    A client has `num_rows // num_clients` rows, and the last one the remainder too; `quantity_beta` makes the sizes
    differ as well. A client's rows stay in the order of the data set. The clients are named `"0"`, `"1"`, …

    Splits are cut by the same `q_j`, with p from the first. Labels are matched by their names. Rows of a label that
    the first split lacks follow no `q_j` and are what re-assignment deals out. A later split need not reach
    `min_size`, but gives every client a row.

    Args:
        num_clients (`int`):
            Number of clients, at least 1.
        label_column (`str`, *optional*, defaults to `"label"`):
            Column with the labels: a `ClassLabel`, strings, whole numbers, truth values, dates, or sequences of tags,
            of which a row counts by its most frequent entity type (see [`~hf_federated.data.labels.read_labels`]). It
            may as well be the column that names a row's task.
        alpha (`float`, *optional*, defaults to `1.0`):
            Concentration (the paper's α): towards 0 a client has one label, above 100 all clients have the shares of
            the whole.
        quantity_beta (`float`, *optional*):
            Lets sizes differ too: they are those of [`QuantityDirichletPartitioner`] with this `beta` and the same
            `num_clients`, `min_size` and `seed`.
        min_size (`int`, *optional*, defaults to `1`):
            Rows that every client has at least.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global generators are neither read nor changed.

    Raises:
        `ValueError`: If there are fewer rows than `num_clients * min_size`, if there is no such column, or if a row
            has no label.
        `TypeError`: If the type of the column does not name classes.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, LabelDirichletPartitioner
    >>> dataset = Dataset.from_dict({"label": ["bad", "good"] * 50})
    >>> partitioner = LabelDirichletPartitioner(num_clients=3, alpha=0.001, seed=0)
    >>> clients = FederatedDataset.from_dataset(dataset, partitioner)
    >>> clients.num_rows
    {'0': 33, '1': 33, '2': 34}
    >>> sorted(set(clients["0"]["label"]))  # one label alone, the smaller alpha the surer
    ['good']

    ```
    """

    num_clients: int
    label_column: str = "label"
    alpha: float = 1.0
    quantity_beta: float | None = None
    min_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number(self, "num_clients", 1)
        check_column_name(self, "label_column")
        check_concentration(self, "alpha")
        if self.quantity_beta is not None:
            check_concentration(self, "quantity_beta")
        check_whole_number(self, "min_size", 1)
        check_whole_number(self, "seed", 0)

    def partition(self, dataset: Dataset) -> Partition:
        return self.partition_splits({"": dataset})[""]

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        labels, names = read_labels_of_splits(splits, self.label_column)
        return self.partition_labels(labels, len(names))

    def partition_labels(self, labels: Mapping[str, np.ndarray], num_labels: int) -> dict[str, Partition]:
        """
        Cuts splits by labels that are not read from a column.

        Args:
            labels (`Mapping[str, np.ndarray]`): Split name to the label of each row, as whole numbers from 0.
            num_labels (`int`): Number of labels over all splits.

        Returns:
            `dict[str, Partition]`: A partition of each split.
        """
        min_size = self.min_size
        sizes = {}
        for name, codes in labels.items():
            check_enough_rows(self, len(codes), self.num_clients, min_size, name)
            sizes[name] = self._sizes(len(codes), min_size)
            min_size = 1
        generator = np.random.default_rng(self.seed)
        first = np.bincount(next(iter(labels.values())), minlength=num_labels)
        shares = draw_shares(generator, self.alpha, first / first.sum(), self.num_clients)
        partitions = {}
        for name, codes in labels.items():
            available = np.bincount(codes, minlength=num_labels)
            # Without the labels that nobody asks for or has: they would only use up random numbers, so that the first
            # split would be cut differently where a later one has more labels.
            drawn = np.flatnonzero(shares.any(axis=0) | (available > 0))
            counts = np.zeros(shares.shape, dtype=np.int64)
            counts[:, drawn] = draw_counts(generator, shares[:, drawn], sizes[name], available[drawn])
            owners = deal_rows(generator, codes, counts)
            partitions[name] = Partition.from_owners(number_clients(self.num_clients), owners)
        return partitions

    def _sizes(self, num_rows: int, min_size: int) -> np.ndarray:
        if self.quantity_beta is not None:
            return quantity_sizes(num_rows, self.num_clients, self.quantity_beta, min_size, self.seed)
        sizes = np.full(self.num_clients, num_rows // self.num_clients, dtype=np.int64)
        sizes[-1] += num_rows % self.num_clients
        return sizes


def draw_counts(
    generator: np.random.Generator, shares: np.ndarray, sizes: np.ndarray, available: np.ndarray
) -> np.ndarray:
    """
    Draws how many rows of each label each client gets, one client after the other, with dynamic re-assignment.

    Args:
        generator (`np.random.Generator`): Where the draws come from.
        shares (`np.ndarray` of shape `(num_clients, num_labels)`): The shares q_j of labels that a client asks for.
        sizes (`np.ndarray` of shape `(num_clients,)`, integer): Rows of each client, at most as many as there are.
        available (`np.ndarray` of shape `(num_labels,)`, integer): Rows there are of each label.

    Returns:
        `np.ndarray` of shape `(num_clients, num_labels)`, `int64`: Rows of client j sum to `sizes[j]`, and those of a
        label to `available` at most.
    """
    left = available.astype(np.int64)
    counts = np.zeros(shares.shape, dtype=np.int64)
    for client, size in enumerate(sizes.tolist()):
        drawn = np.minimum(generator.multinomial(size, shares[client]), left)
        left -= drawn
        missing = size - int(drawn.sum())
        if missing:
            filled = generator.multivariate_hypergeometric(left, missing)
            left -= filled
            drawn += filled
        counts[client] = drawn
    return counts
