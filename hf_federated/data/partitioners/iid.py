"""Rows dealt out at random: the baseline that every non-IID partition is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from .base import Partition, Partitioner, check_enough_rows, check_whole_number, number_clients


@dataclass(frozen=True)
class IidPartitioner(Partitioner):
    """
    Gives every client the same number of rows, drawn without replacement.

    Every row is given away once. Sizes differ by at most one row: the first `num_rows % num_clients` clients have one
    more. A client's rows stay in the order of the data set (the trainer shuffles them each epoch). The clients are
    named `"0"`, `"1"`, …

    Args:
        num_clients (`int`):
            Number of clients, at least 1 and at most the number of rows.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw. The global generators are neither read nor changed.

    Raises:
        `ValueError`: If there are fewer rows than clients.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated import FederatedDataset, IidPartitioner
    >>> dataset = Dataset.from_dict({"text": [f"sentence {i}" for i in range(10)]})
    >>> clients = FederatedDataset.from_dataset(dataset, IidPartitioner(num_clients=3, seed=0))
    >>> clients.num_rows
    {'0': 4, '1': 3, '2': 3}

    ```
    """

    num_clients: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole_number(self, "num_clients", 1)
        check_whole_number(self, "seed", 0)

    def partition(self, dataset: Dataset) -> Partition:
        num_rows = len(dataset)
        check_enough_rows(self, num_rows, self.num_clients, min_size=1)
        owners = np.arange(num_rows) % self.num_clients
        np.random.default_rng(self.seed).shuffle(owners)
        return Partition.from_owners(number_clients(self.num_clients), owners)
