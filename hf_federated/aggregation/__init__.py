"""Averaging algorithms, one per module.

To add an algorithm, add its module, import its class here and register it in `AGGREGATIONS`.
"""

from typing import Any

from ..utils.weighted_mean import WeightedMean
from .base import Accumulator, Aggregation, LocalHook
from .fedavg import FedAvg
from .fednova import FedNova
from .fedopt import FedOpt
from .fedprox import FedProx
from .local_only import LocalOnly
from .mutual_kd import LowRankUpdates, MutualKD
from .scaffold import Scaffold


AGGREGATIONS: dict[str, type[Aggregation]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fednova": FedNova,
    "fedopt": FedOpt,
    "scaffold": Scaffold,
    "local_only": LocalOnly,
    "mutual_kd": MutualKD,
}


def build_aggregation(aggregation: str | Aggregation, kwargs: Any = None) -> Aggregation:
    """
    Build the aggregation algorithm of a configuration.

    Args:
        aggregation (`str` or [`Aggregation`]): Name in `AGGREGATIONS`, or an instance, which is returned unchanged.
        kwargs (`dict`, *optional*): Constructor arguments. Only allowed if `aggregation` is a name.

    Returns:
        [`Aggregation`]: The algorithm.

    Raises:
        ValueError: If the name is unknown, if the constructor does not accept an argument, or if `kwargs` are passed
            together with an instance.
    """
    kwargs = kwargs or {}
    if isinstance(aggregation, Aggregation):
        if kwargs:
            raise ValueError(
                "`aggregation_kwargs` is set, but `aggregation` is an instance. Set `aggregation` to a name, or pass "
                "the arguments to the constructor of the instance."
            )
        return aggregation
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"Unknown aggregation {aggregation!r}. Set it to one of {', '.join(sorted(AGGREGATIONS))}, or pass an "
            "instance of an `Aggregation` subclass."
        )
    try:
        return AGGREGATIONS[aggregation](**kwargs)
    except TypeError as error:
        allowed = sorted(AGGREGATIONS[aggregation]().settings())
        raise ValueError(
            f"Invalid `aggregation_kwargs` of {aggregation!r}: {error}. Allowed arguments are {allowed}."
        ) from error


__all__ = [
    "AGGREGATIONS",
    "Accumulator",
    "Aggregation",
    "FedAvg",
    "FedNova",
    "FedOpt",
    "FedProx",
    "LocalHook",
    "LocalOnly",
    "LowRankUpdates",
    "MutualKD",
    "Scaffold",
    "WeightedMean",
    "build_aggregation",
]
