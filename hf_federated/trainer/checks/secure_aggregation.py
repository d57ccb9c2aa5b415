"""Checks of `secure_aggregation`."""

from __future__ import annotations

from ...aggregation import Aggregation
from ...config import FederatedConfig
from ...secure_aggregation import SecureAggregation
from ...utils.algorithm_names import SECURE_AGGREGATION_NAMES


def build_secure_aggregation(config: FederatedConfig) -> SecureAggregation | None:
    """Build the protocol that a configuration names."""
    if config.secure_aggregation is None:
        return None
    protocol: SecureAggregation = SECURE_AGGREGATION_NAMES.build(
        config.secure_aggregation, config.secure_aggregation_kwargs, SecureAggregation
    )
    return protocol


def limit_weights(aggregation: Aggregation, protocol: SecureAggregation | None) -> None:
    """
    Limit the weights of an averaging algorithm to those of a protocol.

    Args:
        aggregation ([`Aggregation`]): The averaging algorithm, whose `max_weight` is set.
        protocol ([`SecureAggregation`], *optional*): The protocol. Without one, there is no limit.

    Raises:
        ValueError: If the protocol has no `max_weight`, which the weights of the aggregation need.
    """
    if protocol is None:
        return
    if protocol.max_weight is None and aggregation.weighting != "uniform":
        raise ValueError(
            f"secure_aggregation={protocol.name!r} needs the largest weight of an update, because {aggregation!r} "
            f"weights updates by {aggregation.weighting}. Set secure_aggregation_kwargs={{'max_weight': ...}} to the "
            "largest number of a client, such as 2000, or set weighting='uniform' in `aggregation_kwargs`."
        )
    aggregation.max_weight = 1.0 if protocol.max_weight is None else protocol.max_weight
