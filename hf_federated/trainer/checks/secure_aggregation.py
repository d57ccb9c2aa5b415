"""Checks of `secure_aggregation`."""

from __future__ import annotations

from ...aggregation import Aggregation
from ...config import FederatedConfig
from ...secure_aggregation import SecureAggregation
from ...secure_aggregation.encoding import RingEncoding
from ...utils.algorithm_names import SECURE_AGGREGATION_NAMES


def build_secure_aggregation(config: FederatedConfig) -> SecureAggregation | None:
    """
    Build the protocol that a configuration names.

    Args:
        config ([`FederatedConfig`]): The configuration.

    Raises:
        ValueError: If there are arguments without a protocol, or arguments that the protocol does not accept.
    """
    if config.secure_aggregation is None:
        if config.secure_aggregation_kwargs:
            raise ValueError(
                f"secure_aggregation_kwargs={config.secure_aggregation_kwargs} is set, but `secure_aggregation` is "
                "None, so the server would see every update. Set secure_aggregation='secagg', or leave the arguments "
                "out."
            )
        return None
    return SECURE_AGGREGATION_NAMES.build(
        config.secure_aggregation, config.secure_aggregation_kwargs, SecureAggregation
    )


def check_weights(aggregation: Aggregation, protocol: SecureAggregation | None) -> None:
    """
    Check that a protocol limits the weights of an averaging algorithm.

    Args:
        aggregation ([`Aggregation`]): The averaging algorithm.
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


def check_cohort(protocol: SecureAggregation, num_clients: int) -> None:
    """
    Check that a protocol works with the number of clients of a round.

    Args:
        protocol ([`SecureAggregation`]): The protocol.
        num_clients (`int`): Number of clients that a round samples.

    Raises:
        ValueError: If there are too few clients for the protocol, or too many for its number of bits, or if `clip`
            names an unknown mean.
    """
    if num_clients < protocol.min_survivors:
        raise ValueError(
            f"A round samples {num_clients} clients, but min_survivors={protocol.min_survivors} of "
            "`secure_aggregation_kwargs` is the smallest number of clients in a sum. Raise `clients_per_round` or the "
            f"number of clients to at least {protocol.min_survivors}."
        )
    protocol.threshold_of(num_clients)
    # The encoding checks the settings before it has tensors.
    RingEncoding({"state": {}, "extra": {}}, num_clients, 1.0, protocol.clip, protocol.modulus)
