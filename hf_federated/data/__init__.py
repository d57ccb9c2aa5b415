"""A data set that belongs to many clients, ways to make one, and what it looks like."""

from .curve_plots import CurvePanel, plot_learning_curves
from .distillation_split import DistillationSplit, split_for_distillation
from .federated_dataset import FederatedDataset
from .federated_dataset_dict import FederatedDatasetDict
from .hub import ConcurrentPushError
from .label_statistics import LabelCounts, estimate_alpha, jensen_shannon_divergence, label_counts, mean_divergence
from .partition_file import PartitionFile, PartitionFileError
from .partition_plots import plot_divergence, plot_label_shares, plot_partition, plot_sizes
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
from .statistics import PartitionStatistics, describe_partition
from .text_plots import plot_text_map
from .text_statistics import vocabulary_overlap


__all__ = [
    "ConcurrentPushError",
    "CurvePanel",
    "DatasetSource",
    "DistillationSplit",
    "FeatureClusterPartitioner",
    "FederatedDataset",
    "FederatedDatasetDict",
    "IidPartitioner",
    "LabelCounts",
    "LabelDirichletPartitioner",
    "MultiDomainPartitioner",
    "NaturalPartitioner",
    "NestedPartitioner",
    "Partition",
    "PartitionFile",
    "PartitionFileError",
    "PartitionStatistics",
    "Partitioner",
    "PerClassDirichletPartitioner",
    "QuantityDirichletPartitioner",
    "describe_partition",
    "estimate_alpha",
    "jensen_shannon_divergence",
    "label_counts",
    "mean_divergence",
    "plot_divergence",
    "plot_label_shares",
    "plot_learning_curves",
    "plot_partition",
    "plot_sizes",
    "plot_text_map",
    "split_for_distillation",
    "vocabulary_overlap",
]
