"""
Average of the clients' parts in a networked run, computed by one of the clients.

The client that averages sees the parameters of the other clients, but not their examples. It refuses by name what a
client cannot have: more examples than the steps of the averaging period have, or parameters that changed more than
`MAX_CHANGE_RATIO` times as much as those of the other clients. A refused client is left out of the mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping

import torch
from transformers.utils import logging

from ..aggregation import WeightedMean
from .messages import PartParameters
from .optimization import averaging_weights


logger = logging.get_logger(__name__)

State = Mapping[str, torch.Tensor]

# Largest accepted multiple of the change of other clients, as a norm.
MAX_CHANGE_RATIO = 100.0
# Largest accepted change in a turn of another client, as a multiple of the norm of the parameters.
MAX_HANDOVER_RATIO = 10.0


class InvalidPartsError(ValueError):
    """Raised if the parameters of another client cannot be used."""


def average_parts(
    messages: Iterable[PartParameters], own: PartParameters, start: State, max_examples: int
) -> dict[str, torch.Tensor]:
    """
    Return the mean of the parts of several clients, weighted by the number of examples.

    Clients that claim too many examples or changed the parameters too much are left out.

    Args:
        messages (`Iterable[PartParameters]`): The parts of all clients, in the order of the sum.
        own ([`PartParameters`]): The parts of the client that averages, which are among `messages`.
        start (`Mapping[str, torch.Tensor]`): The parameters at the start of the averaging period, equal for all
            clients. Empty if it is not known: the changes are then not checked.
        max_examples (`int`): Number of examples that a client can have trained in the period.
    """
    accepted: dict[str, PartParameters] = {}
    for message in messages:
        if message is own or message.num_rows <= max_examples:
            accepted[message.client_id] = message
        else:
            logger.warning(
                f"The average is computed without client {message.client_id!r}, which claims {message.num_rows} "
                f"examples since the last average. Its steps have at most {max_examples}."
            )
    changes = {name: change_norm(message.state, start) for name, message in accepted.items() if start}
    for client_id, change in changes.items():
        others = [value for name, value in changes.items() if name != client_id]
        limit = change_limit(max(statistics.median_low(others or [0.0]), changes[own.client_id]))
        if client_id != own.client_id and limit is not None and not change <= limit:
            logger.warning(
                f"The average is computed without client {client_id!r}, whose parameters changed by {change:.3g} "
                f"since the last average. At most {limit:.3g} is expected from the changes of the other clients."
            )
            del accepted[client_id]
    mean = WeightedMean()
    for client_id, weight in averaging_weights({name: item.num_rows for name, item in accepted.items()}).items():
        mean.add(accepted[client_id].state, weight)
    return mean.finalize()


def change_norm(state: State, start: State) -> float:
    """Norm of the difference of two states with the same names and shapes."""
    return math.sqrt(
        math.fsum(
            float(torch.linalg.vector_norm(value.detach().cpu().double() - start[name].detach().cpu().double())) ** 2
            for name, value in state.items()
        )
    )


def change_limit(reference: float) -> float | None:
    """Return the largest accepted change, or `None` if no other client changed its parameters."""
    return MAX_CHANGE_RATIO * reference if reference > 0 else None


def check_handover(message: PartParameters, own: State) -> None:
    """
    Check the parts of the previous client against the older parts of this client.

    Raises:
        InvalidPartsError: If the parts changed much more than their own size.
    """
    change = change_norm(message.state, own)
    limit = MAX_HANDOVER_RATIO * change_norm(own, {name: torch.zeros_like(value) for name, value in own.items()})
    if limit and not change <= limit:
        raise InvalidPartsError(
            f"The parameters of client {message.client_id!r} at step {message.step} differ by {change:.3g} from the "
            f"older parameters of this client, but at most {limit:.3g} is accepted."
        )
