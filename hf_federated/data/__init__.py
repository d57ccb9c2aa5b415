"""A data set that belongs to many clients, and ways to make one."""

from .distillation_split import DistillationSplit, split_for_distillation
from .federated_dataset import FederatedDataset
from .federated_dataset_dict import FederatedDatasetDict
from .hub import ConcurrentPushError
from .partition_file import PartitionFile, PartitionFileError
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
from .source import DatasetSource


__all__ = [
    "ConcurrentPushError",
    "DatasetSource",
    "DistillationSplit",
    "FeatureClusterPartitioner",
    "FederatedDataset",
    "FederatedDatasetDict",
    "IidPartitioner",
    "LabelDirichletPartitioner",
    "MultiDomainPartitioner",
    "NaturalPartitioner",
    "NestedPartitioner",
    "Partition",
    "PartitionFile",
    "PartitionFileError",
    "Partitioner",
    "PerClassDirichletPartitioner",
    "QuantityDirichletPartitioner",
    "split_for_distillation",
]
