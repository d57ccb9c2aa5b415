"""Averaging algorithms, one a file. A new one adds its file, its import and its line in `AGGREGATIONS`."""

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
    The algorithm that a configuration names.

    Args:
        aggregation (`str` or [`Aggregation`]): A name of `AGGREGATIONS`, or an instance, which is returned as it is.
        kwargs (`dict`, *optional*): The constructor's arguments for a name.

    Raises:
        ValueError: If the name is unknown, an argument does not fit, or arguments come with an instance.
    """
    kwargs = kwargs or {}
    if isinstance(aggregation, Aggregation):
        if kwargs:
            raise ValueError("`aggregation_kwargs` go with a name; give them to the instance instead.")
        return aggregation
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"Unknown aggregation {aggregation!r}; known are {', '.join(sorted(AGGREGATIONS))}. "
            "An instance of your own `Aggregation` works too."
        )
    try:
        return AGGREGATIONS[aggregation](**kwargs)
    except TypeError as error:
        allowed = sorted(AGGREGATIONS[aggregation]().settings())
        raise ValueError(f"`aggregation_kwargs` of {aggregation!r}: {error}. Allowed are {allowed}.") from error


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
