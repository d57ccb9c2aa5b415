"""Clients with different numbers of examples and the same distribution (FedNLP, Lin et al. 2022, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from .base import (
    Partition,
    SplitsPartitioner,
    check_enough_rows,
    check_settings,
    check_splits,
    numbered_client_ids,
)
from .dirichlet import draw_shares, split_by_shares


@dataclass(frozen=True)
class QuantityDirichletPartitioner(SplitsPartitioner):
    """
    Partitioner that gives clients different numbers of examples, drawn at random without replacement.

    The shares of the clients are drawn as `z ~ Dir(beta)`. The sizes are the differences of
    `floor(cumsum(z) * num_rows)`. A client with fewer than `min_size` examples is raised to `min_size`. The missing
    examples are taken from the larger clients, in proportion to their examples above `min_size`. Every example is
    assigned to one client. The examples of a client stay in the order of the dataset.

    All splits use the same `z`. In the splits after the first, clients may have fewer than `min_size` examples, but
    every client has at least one.

    Args:
        num_clients (`int`):
            Number of clients, at least 1.
        beta (`float`, *optional*, defaults to `5.0`):
            Concentration of the sizes (β in the paper). At 0.1, a few clients have almost all examples. Above 100, all
            clients have about the same number.
        min_size (`int`, *optional*, defaults to `1`):
            Minimum number of examples per client in the first split.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws. The global random generators are neither used nor changed.

    Raises:
        `ValueError`: If there are fewer than `num_clients * min_size` examples.

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
        check_settings(self)

    def partition_splits(self, splits: Mapping[str, Dataset]) -> dict[str, Partition]:
        check_splits(splits)
        generator = np.random.default_rng(self.seed)
        partitions: dict[str, Partition] = {}
        for name, dataset in splits.items():
            min_size = 1 if partitions else self.min_size
            check_enough_rows(self, len(dataset), self.num_clients, min_size, name)
            sizes = quantity_sizes(len(dataset), self.num_clients, self.beta, min_size, self.seed)
            owners = np.repeat(np.arange(self.num_clients), sizes)
            generator.shuffle(owners)
            partitions[name] = Partition.from_owners(numbered_client_ids(self.num_clients), owners)
        return partitions


def quantity_sizes(num_rows: int, num_clients: int, beta: float, min_size: int, seed: int) -> np.ndarray:
    """
    Compute client sizes from Dirichlet shares.

    Returns:
        `np.ndarray` of shape `(num_clients,)`, `int64`: Sizes of at least `min_size` that sum to `num_rows`. They
        depend only on the arguments.
    """
    # A generator with seed [seed, 1], because the caller draws from the generator with seed `seed`. The two sequences
    # must be independent.
    generator = np.random.default_rng([seed, 1])
    sizes = split_by_shares(draw_shares(generator, beta, np.ones(num_clients), 1)[0], num_rows)
    missing = int(np.maximum(min_size - sizes, 0).sum())
    if missing == 0:
        return sizes
    surplus = np.maximum(sizes - min_size, 0)
    taken = surplus * missing // int(surplus.sum())
    # Integer division leaves a remainder of less than one row per client. The largest clients give these rows.
    largest = np.argsort(taken - surplus, kind="stable")[: missing - int(taken.sum())]
    taken[largest] += 1
    return np.maximum(sizes, min_size) - taken
