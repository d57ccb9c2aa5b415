"""A data set that belongs to many clients, and ways to make one."""

from .federated_dataset import FederatedDataset
from .partitioners import (
    IidPartitioner,
    LabelDirichletPartitioner,
    Partition,
    Partitioner,
    QuantityDirichletPartitioner,
)


__all__ = [
    "FederatedDataset",
    "IidPartitioner",
    "LabelDirichletPartitioner",
    "Partition",
    "Partitioner",
    "QuantityDirichletPartitioner",
]
