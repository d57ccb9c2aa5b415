"""A data set that belongs to many clients, ways to make one, and what it looks like."""

from .federated_dataset import FederatedDataset
from .label_statistics import LabelCounts, estimate_alpha, jensen_shannon_divergence, label_counts, mean_divergence
from .partitioners import IidPartitioner, Partition, Partitioner
from .statistics import PartitionStatistics, describe_partition
from .text_statistics import vocabulary_overlap


__all__ = [
    "FederatedDataset",
    "IidPartitioner",
    "LabelCounts",
    "Partition",
    "PartitionStatistics",
    "Partitioner",
    "describe_partition",
    "estimate_alpha",
    "jensen_shannon_divergence",
    "label_counts",
    "mean_divergence",
    "vocabulary_overlap",
]
