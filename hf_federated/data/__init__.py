"""Federated datasets, the partitioners that create them, and the statistics and plots that describe them."""

from .checks import Finding, check_datasets
from .distillation_split import DistillationSplit, split_for_distillation
from .federated_dataset import FederatedDataset, FederatedDatasetDict
from .hub import ConcurrentPushError
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
from .plots.partition_plots import plot_divergence, plot_label_shares, plot_partition
from .plots.size_plots import plot_sizes
from .plots.text_plots import plot_text_map
from .source import DatasetSource
from .statistics.dirichlet_concentration import estimate_alpha
from .statistics.label_statistics import (
    LabelCounts,
    jensen_shannon_divergence,
    label_counts,
    mean_divergence,
)
from .statistics.partition_statistics import PartitionStatistics, describe_partition
from .statistics.text_statistics import vocabulary_overlap
from .storage.partition_file import PartitionFile, PartitionFileError


__all__ = [
    "ConcurrentPushError",
    "DatasetSource",
    "DistillationSplit",
    "FeatureClusterPartitioner",
    "FederatedDataset",
    "FederatedDatasetDict",
    "Finding",
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
    "check_datasets",
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
    "split_for_distillation",
    "vocabulary_overlap",
]
