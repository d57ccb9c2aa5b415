"""Clients of different sizes whose rows are alike (FedNLP, Lin et al. 2022, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from .base import (
    Partition,
    Partitioner,
    check_concentration,
    check_enough_rows,
    check_splits,
    check_whole_number,
    number_clients,
)
from .dirichlet import cut_by_shares, draw_shares


@dataclass(frozen=True)
class QuantityDirichletPartitioner(Partitioner):
    """
    Gives clients different numbers of rows, drawn at random without replacement.

    Shares of the data `z ~ Dir(beta)` are drawn, and the sizes are the differences of `floor(cumsum(z) * num_rows)`.
    A client that would have fewer than `min_size` rows is raised to it; these rows are taken from the others in
    proportion to what they have beyond `min_size`. Every row is given away once. A client's rows stay in the order of
    the data set. Splits are cut by the same `z`; a later one need not reach `min_size`, but gives every client a row.

    Args:
        num_clients (`int`):
            Number of clients, at least 1.
        beta (`float`, *optional*, defaults to `5.0`):
            Concentration of the sizes (the paper's β): at 0.1 a few clients have nearly everything, above 100 all have
            about as much.
        min_size (`int`, *optional*, defaults to `1`):
            Rows that every client has at least.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global generators are neither read nor changed.

    Raises:
        `ValueError`: If there are fewer rows than `num_clients * min_size`.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, QuantityDirichletPartitioner
    >>> dataset = Dataset.from_dict({"text": [f"sentence {i}" for i in range(100)]})
    >>> clients = FederatedDataset.from_dataset(dataset, QuantityDirichletPartitioner(num_clients=4, beta=1.0))
    >>> sizes = clients.num_rows.values()
    >>> sum(sizes), len(set(sizes)) > 1
    (100, True)

    ```
    """

    num_clients: int
    beta: float = 5.0
    min_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number(self, "num_clients", 1)
        check_concentration(self, "beta")
        check_whole_number(self, "min_size", 1)
        check_whole_number(self, "seed", 0)

    def partition(self, dataset: Dataset) -> Partition:
        return self.partition_splits({"": dataset})[""]

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        generator = np.random.default_rng(self.seed)
        partitions = {}
        min_size = self.min_size
        for name, dataset in splits.items():
            check_enough_rows(self, len(dataset), self.num_clients, min_size, name)
            sizes = quantity_sizes(len(dataset), self.num_clients, self.beta, min_size, self.seed)
            owners = np.repeat(np.arange(self.num_clients), sizes)
            generator.shuffle(owners)
            partitions[name] = Partition.from_owners(number_clients(self.num_clients), owners)
            min_size = 1
        return partitions


def quantity_sizes(num_rows: int, num_clients: int, beta: float, min_size: int, seed: int) -> np.ndarray:
    """
    Sizes of clients by a quantity Dirichlet.

    Returns:
        `np.ndarray` of shape `(num_clients,)`, `int64`: At least `min_size` each, `num_rows` in all. They depend on
        nothing but the arguments.
    """
    # Not the generator of the seed alone: a partitioner that draws more from it must not draw the same again.
    generator = np.random.default_rng([seed, 1])
    sizes = cut_by_shares(draw_shares(generator, beta, np.ones(num_clients), 1)[0], num_rows)
    missing = int(np.maximum(min_size - sizes, 0).sum())
    if missing == 0:
        return sizes
    surplus = np.maximum(sizes - min_size, 0)
    taken = surplus * missing // int(surplus.sum())
    # The division leaves over less than a row of each; the largest give those.
    largest = np.argsort(taken - surplus, kind="stable")[: missing - int(taken.sum())]
    taken[largest] += 1
    return np.maximum(sizes, min_size) - taken
