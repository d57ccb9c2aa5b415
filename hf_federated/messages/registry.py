"""Deserialization of messages of any kind."""

from __future__ import annotations

from typing import Any

from .base import Message, kind_of
from .distillation import Distill, Feedback, Predict, Predictions
from .serialization import unpack
from .training import ClientFailure, ClientUpdate, Evaluate, Fit, Metrics


KINDS: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (Fit, ClientUpdate, Evaluate, Metrics, Predict, Predictions, Distill, Feedback, ClientFailure)
}


def message_from_tree(tree: Any) -> Message:
    """
    Create a message from a tree, for any kind of message.

    Args:
        tree (`Any`): Tree from [`~Message.to_tree`] or from [`~hf_federated.messages.serialization.unpack`].

    Raises:
        ValueError: If the kind is unknown or the fields differ from the fields of the kind.
    """
    kind = kind_of(tree)
    if kind not in KINDS:
        raise ValueError(f"Unknown message kind {kind!r}; known kinds are {sorted(KINDS)}.")
    return KINDS[kind]._from_tree(tree)


def read_message(blob: bytes | memoryview) -> Message:
    """
    Create a message from a blob, for any kind of message.

    Args:
        blob (`bytes` or `memoryview`): Serialized message, as for [`unpack`].

    Raises:
        ValueError: If the blob is damaged, the kind is unknown or the fields differ from the fields of the kind.
    """
    return message_from_tree(unpack(blob))
