"""A data set that belongs to many clients, and ways to make one."""

from .federated_dataset import FederatedDataset
from .partitioners import (
    FeatureClusterPartitioner,
    IidPartitioner,
    LabelDirichletPartitioner,
    MultiDomainPartitioner,
    NaturalPartitioner,
    NestedPartitioner,
    Partition,
    Partitioner,
    PerClassDirichletPartitioner,
    QuantityDirichletPartitioner,
)


__all__ = [
    "FeatureClusterPartitioner",
    "FederatedDataset",
    "IidPartitioner",
    "LabelDirichletPartitioner",
    "MultiDomainPartitioner",
    "NaturalPartitioner",
    "NestedPartitioner",
    "Partition",
    "Partitioner",
    "PerClassDirichletPartitioner",
    "QuantityDirichletPartitioner",
]
