"""What the server half and the client half of a method share: the round, its sums, and the two base classes."""

from .accumulator import Accumulator
from .update_collection import UpdateCollection


__all__ = ["Accumulator", "UpdateCollection"]
