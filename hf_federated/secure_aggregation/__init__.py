"""Secure aggregation: the server learns the sum of the updates of a round, and no single update."""

from collections.abc import Mapping
from types import MappingProxyType

from ..utils.algorithm_names import SECURE_AGGREGATION_NAMES, import_reference
from .base import SecureAggregation
from .lightsecagg import LightSecAgg
from .secagg import SecAgg
from .secagg_plus import SecAggPlus


SECURE_AGGREGATIONS: Mapping[str, type[SecureAggregation]] = MappingProxyType(
    {name: import_reference(reference) for name, reference in SECURE_AGGREGATION_NAMES.built_in.items()}
)
"""The protocols, by the name that `secure_aggregation` of [`FederatedConfig`] accepts."""


__all__ = ["SECURE_AGGREGATIONS", "LightSecAgg", "SecAgg", "SecAggPlus", "SecureAggregation"]
