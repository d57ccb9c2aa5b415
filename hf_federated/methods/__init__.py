"""What the server half and the client half of a method share: the round, its sums, and the two base classes."""

from ..utils.weighted_sums import WeightedSums
from .accumulator import Accumulator, Contribution
from .base import Method
from .client_part import ClientContext, ClientPart
from .round import Round
from .update_collection import UpdateCollection


__all__ = [
    "Accumulator",
    "ClientContext",
    "ClientPart",
    "Contribution",
    "Method",
    "Round",
    "UpdateCollection",
    "WeightedSums",
]
