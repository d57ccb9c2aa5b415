"""Ways to cut one data set into clients, one a file."""

from .base import Partition, Partitioner
from .iid import IidPartitioner
from .label_dirichlet import LabelDirichletPartitioner
from .quantity import QuantityDirichletPartitioner


__all__ = [
    "IidPartitioner",
    "LabelDirichletPartitioner",
    "Partition",
    "Partitioner",
    "QuantityDirichletPartitioner",
]
