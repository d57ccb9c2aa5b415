"""Messages between server and clients, their serialization, and the checks of received updates."""

from .announcement import ANNOUNCED_VALUES, Announcement
from .base import FlatMessage, Message, Serializable
from .disclosure import Disclosure
from .distillation import Distill, Feedback, Predict, Predictions, PublicRowsMessage, public_order
from .registry import KINDS, kinds_of, message_from_tree, read_message
from .training import CLASS_COUNT, ClientFailure, ClientUpdate, Evaluate, Fit, Metrics
from .validation import RefusedRequestError, refusing


__all__ = [
    "ANNOUNCED_VALUES",
    "CLASS_COUNT",
    "KINDS",
    "Announcement",
    "ClientFailure",
    "ClientUpdate",
    "Disclosure",
    "Distill",
    "Evaluate",
    "Feedback",
    "Fit",
    "FlatMessage",
    "Message",
    "Metrics",
    "Predict",
    "Predictions",
    "PublicRowsMessage",
    "RefusedRequestError",
    "Serializable",
    "kinds_of",
    "message_from_tree",
    "public_order",
    "read_message",
    "refusing",
]
