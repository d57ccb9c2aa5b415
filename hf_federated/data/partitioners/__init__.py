"""Ways to cut one data set into clients, one a file."""

from .base import Partition, Partitioner
from .iid import IidPartitioner


__all__ = ["IidPartitioner", "Partition", "Partitioner"]
