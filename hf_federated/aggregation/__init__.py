"""Averaging algorithms, one per module.

To add an algorithm, add its module, import its class here and add its name to `utils/algorithm_names.py`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..methods import Accumulator, UpdateCollection
from ..methods.previous_release import LocalHook
from ..utils.algorithm_names import AGGREGATION_NAMES, import_reference
from ..utils.weighted_mean import WeightedMean
from .base import Aggregation
from .centered_clipping import CenteredClipping
from .coordinate_median import CoordinateMedian
from .fedavg import FedAvg
from .fedex_lora import FedExLoRA
from .fedexp import FedExP
from .fedit import FedIT
from .fednova import FedNova
from .fedopt import FedOpt
from .fedper import FedPer
from .fedprox import FedProx
from .fedsvd import FedSVD
from .ffa_lora import FFALoRA
from .fltrust import FLTrust
from .geometric_median import GeometricMedian
from .krum import Krum
from .local_only import LocalOnly
from .lora_method import LoraAggregation
from .mutual_kd import LowRankUpdates, MutualKD
from .norm_bounded_mean import NormBoundedMean
from .robust import RobustAggregation
from .rolora import RoLoRA
from .scaffold import Scaffold
from .server_optimizer import ServerOptimizer
from .stacked_lora import StackedLora
from .trimmed_mean import TrimmedMean


AGGREGATIONS: Mapping[str, type[Aggregation]] = MappingProxyType(
    {name: import_reference(reference) for name, reference in AGGREGATION_NAMES.built_in.items()}
)
"""The averaging algorithms, by the name that `aggregation` of [`FederatedConfig`] accepts."""


def build_aggregation(aggregation: str | Aggregation, kwargs: Any = None) -> Aggregation:
    """
    Build the aggregation algorithm of a configuration.

    Args:
        aggregation (`str` or [`Aggregation`]): Name in `AGGREGATIONS`, name of an entry point of an installed package,
            a reference `my_package.module:MyClass`, or an instance, which is returned unchanged.
        kwargs (`dict`, *optional*): Constructor arguments. Only allowed if `aggregation` is a name.

    Returns:
        [`Aggregation`]: The algorithm.

    Raises:
        ValueError: If the name is unknown, if it does not name a subclass of [`Aggregation`], if the constructor does
            not accept an argument, or if `kwargs` are passed together with an instance.
    """
    return AGGREGATION_NAMES.build(aggregation, kwargs, Aggregation)


__all__ = [
    "AGGREGATIONS",
    "Accumulator",
    "Aggregation",
    "CenteredClipping",
    "CoordinateMedian",
    "FFALoRA",
    "FLTrust",
    "FedAvg",
    "FedExLoRA",
    "FedExP",
    "FedIT",
    "FedNova",
    "FedOpt",
    "FedPer",
    "FedProx",
    "FedSVD",
    "GeometricMedian",
    "Krum",
    "LocalHook",
    "LocalOnly",
    "LoraAggregation",
    "LowRankUpdates",
    "MutualKD",
    "NormBoundedMean",
    "RoLoRA",
    "RobustAggregation",
    "Scaffold",
    "ServerOptimizer",
    "StackedLora",
    "TrimmedMean",
    "UpdateCollection",
    "WeightedMean",
    "build_aggregation",
]
