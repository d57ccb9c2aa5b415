"""The messages between server and clients, their bytes, and the checks of what arrives."""

from .messages import (
    CLASS_COUNT,
    KINDS,
    ClientFailure,
    ClientUpdate,
    Distill,
    Evaluate,
    Feedback,
    Fit,
    Message,
    Metrics,
    Packed,
    Predict,
    Predictions,
    PublicRowsMessage,
    message_from_tree,
    public_order,
    read_message,
)


__all__ = [
    "CLASS_COUNT",
    "KINDS",
    "ClientFailure",
    "ClientUpdate",
    "Distill",
    "Evaluate",
    "Feedback",
    "Fit",
    "Message",
    "Metrics",
    "Packed",
    "Predict",
    "Predictions",
    "PublicRowsMessage",
    "message_from_tree",
    "public_order",
    "read_message",
]
