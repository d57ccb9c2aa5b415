"""IID partitioning by random assignment, the baseline for every non-IID partition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from .base import Partition, Partitioner, check_enough_rows, check_settings, numbered_client_ids


@dataclass(frozen=True)
class IidPartitioner(Partitioner):
    """
    Partitioner that gives every client the same number of examples, drawn without replacement.

    Every example is assigned to one client. Sizes differ by at most one example: the first `num_rows % num_clients`
    clients have one more. The examples of a client stay in the order of the dataset, because the trainer shuffles them
    in each epoch. The clients are named `"0"`, `"1"`, …

    Args:
        num_clients (`int`):
            Number of clients, at least 1 and at most the number of examples.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draw. The global random generators are neither used nor changed.

    Raises:
        `ValueError`: If there are fewer examples than clients.

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
        check_settings(self)

    def partition(self, dataset: Dataset) -> Partition:
        num_rows = len(dataset)
        check_enough_rows(self, num_rows, self.num_clients, min_size=1)
        owners = np.arange(num_rows) % self.num_clients
        np.random.default_rng(self.seed).shuffle(owners)
        return Partition.from_owners(numbered_client_ids(self.num_clients), owners)
