"""Deserialization of messages of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..utils.fields import describe
from .base import Message, kind_of
from .distillation import Distill, Feedback, Predict, Predictions
from .serialization import MAX_TENSORS, unpack
from .training import ClientFailure, ClientUpdate, Evaluate, Fit, Metrics


def kinds_of(*classes: type[Message]) -> dict[str, type[Message]]:
    """
    Map the kinds of messages to their classes.

    Args:
        *classes (`type[Message]`): Classes of messages, in addition to those of training and evaluation ([`Fit`],
            [`ClientUpdate`], [`Evaluate`], [`Metrics`] and [`ClientFailure`]).

    Raises:
        ValueError: If a class is not a message, has no kind, or has the kind of another class.

    Example:

    ```python
    >>> from hf_federated.messages import Predict, Predictions, kinds_of

    >>> list(kinds_of(Predict, Predictions))
    ['fit', 'client_update', 'evaluate', 'metrics', 'client_failure', 'predict', 'predictions']
    ```
    """
    kinds: dict[str, type[Message]] = {}
    for cls in (Fit, ClientUpdate, Evaluate, Metrics, ClientFailure, *classes):
        if not (isinstance(cls, type) and issubclass(cls, Message)):
            raise ValueError(f"{cls!r} is not a message. Pass a subclass of `Message`.")
        name = cls.__name__
        if not cls.kind:
            raise ValueError(f"{name} has no kind. Set `kind: ClassVar[str]` of the class to a name in messages.")
        known = kinds.setdefault(cls.kind, cls)
        if known is not cls:
            raise ValueError(f"{name} has the kind {cls.kind!r} of {known.__name__}. Set `kind` to another name.")
    return kinds


# The kinds of the messages of this library.
KINDS: dict[str, type[Message]] = kinds_of(Predict, Predictions, Distill, Feedback)


def message_from_tree(tree: Any, kinds: Mapping[str, type[Message]] = KINDS) -> Message:
    """
    Create a message from a tree, for any kind of message.

    Args:
        tree (`Any`): Tree from [`~Message.to_tree`] or from [`~hf_federated.messages.serialization.unpack`].
        kinds (`Mapping[str, type[Message]]`, *optional*): The allowed kinds and their classes, as from [`kinds_of`].
            Defaults to the messages of this library.

    Raises:
        ValueError: If the kind is unknown or the fields differ from the fields of the kind.
    """
    kind = kind_of(tree)
    if kind not in kinds:
        raise ValueError(f"Unknown message kind {describe(kind)}; known kinds are {sorted(kinds)}.")
    return kinds[kind]._from_tree(tree)


def read_message(
    blob: bytes | memoryview, kinds: Mapping[str, type[Message]] = KINDS, max_tensors: int = MAX_TENSORS
) -> Message:
    """
    Create a message from a blob, for any kind of message.

    Args:
        blob (`bytes` or `memoryview`): Serialized message, as for [`unpack`].
        kinds (`Mapping[str, type[Message]]`, *optional*): As in [`message_from_tree`].
        max_tensors (`int`, *optional*): Largest number of tensors, as for [`unpack`].

    Raises:
        ValueError: If the blob is damaged, the kind is unknown or the fields differ from the fields of the kind.
    """
    return message_from_tree(unpack(blob, max_tensors), kinds)
