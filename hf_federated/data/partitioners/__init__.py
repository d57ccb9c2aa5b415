"""Ways to cut one data set into clients, one a file."""

from .base import Partition, Partitioner
from .feature_cluster import FeatureClusterPartitioner
from .iid import IidPartitioner
from .label_dirichlet import LabelDirichletPartitioner
from .multi_domain import MultiDomainPartitioner
from .natural import NaturalPartitioner
from .nested import NestedPartitioner
from .per_class import PerClassDirichletPartitioner
from .quantity import QuantityDirichletPartitioner


__all__ = [
    "FeatureClusterPartitioner",
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
