"""Reading a message of any kind."""

from __future__ import annotations

from typing import Any

from .base import Message
from .distillation import Distill, Feedback, Predict, Predictions
from .serialization import unpack
from .training import ClientFailure, ClientUpdate, Evaluate, Fit, Metrics


KINDS: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (Fit, ClientUpdate, Evaluate, Metrics, Predict, Predictions, Distill, Feedback, ClientFailure)
}


def message_from_tree(tree: Any) -> Message:
    """
    The message of whatever kind that a tree holds.

    Args:
        tree (`Any`): From [`~Message.to_tree`], or from `unpack`.

    Raises:
        ValueError: If its kind is unknown or it has other fields than the kind declares.
    """
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"Unknown kind of message {kind!r}; known are {sorted(KINDS)}.")
    return KINDS[kind]._from_tree(tree)


def read_message(blob: bytes) -> Message:
    """
    The message of whatever kind a blob holds.

    Raises:
        ValueError: If the blob is damaged or its kind is unknown.
    """
    return message_from_tree(unpack(blob))
