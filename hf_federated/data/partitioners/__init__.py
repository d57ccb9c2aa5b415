"""Partitioners: each module has one strategy for partitioning a dataset across clients.

All partitioners are subclasses of [`Partitioner`] and return a [`Partition`].
"""

from .base import Partition, Partitioner
from .feature_cluster import FeatureClusterPartitioner
from .iid import IidPartitioner
from .label_dirichlet import LabelDirichletPartitioner
from .multi_domain import MultiDomainPartitioner
from .natural import NaturalPartitioner
from .nested import NestedPartitioner
from .per_class import PerClassDirichletPartitioner
from .quantity import QuantityDirichletPartitioner


# Names of the partitioners on the command line and in recipes. `NestedPartitioner` is absent because its arguments are
# partitioners. It can only be constructed in Python.
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
