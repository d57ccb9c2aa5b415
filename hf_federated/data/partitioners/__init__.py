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


# Their names on a command line and in recipes. `NestedPartitioner`, which takes others, is built in Python.
PARTITIONERS: dict[str, type[Partitioner]] = {
    "feature-cluster": FeatureClusterPartitioner,
    "iid": IidPartitioner,
    "label-dirichlet": LabelDirichletPartitioner,
    "multi-domain": MultiDomainPartitioner,
    "natural": NaturalPartitioner,
    "per-class-dirichlet": PerClassDirichletPartitioner,
    "quantity-dirichlet": QuantityDirichletPartitioner,
}

__all__ = [
    "PARTITIONERS",
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
