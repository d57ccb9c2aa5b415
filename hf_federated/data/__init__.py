"""A data set that belongs to many clients, ways to make one, and what it looks like."""

from .federated_dataset import FederatedDataset
from .label_statistics import LabelCounts, estimate_alpha, jensen_shannon_divergence, label_counts, mean_divergence
from .partition_plots import plot_divergence, plot_label_shares, plot_partition, plot_sizes
from .partitioners import IidPartitioner, Partition, Partitioner
from .statistics import PartitionStatistics, describe_partition
from .text_plots import plot_text_map
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
    "plot_divergence",
    "plot_label_shares",
    "plot_partition",
    "plot_sizes",
    "plot_text_map",
    "vocabulary_overlap",
]
