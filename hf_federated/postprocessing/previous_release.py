"""Compatibility with 0.1: postprocessors with the methods `client_side` and `server_side`. Remove it in 1.0."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


NEW_NAMES = {"client_side": "client_send", "server_side": "server_receive"}


def adapt_old_names(cls: type) -> None:
    """
    Let a step with the old methods run, and let `super().client_side(...)` of such a step call the new methods.

    Args:
        cls (`type`): A subclass of [`Postprocessor`], or the class itself. It is changed in place.
    """
    for old, new in NEW_NAMES.items():
        definer = next(base for base in cls.__mro__ if old in vars(base) or new in vars(base))
        if new not in vars(definer):
            warnings.warn(
                f"{cls.__name__}.{old} is a method of hf_federated 0.1. Rename it to `{new}` and add `memory` as its "
                "last argument.",
                FutureWarning,
                stacklevel=3,
            )
            setattr(cls, new, _without_memory(getattr(cls, old)))
        elif definer is cls and old not in vars(cls):
            setattr(cls, old, _with_empty_memory(getattr(cls, new), old, new))


def _without_memory(method: Callable[..., Any]) -> Callable[..., Any]:
    def adapted(self: Any, update: Any, context: Any, memory: dict[str, Any]) -> Any:
        """Call the method of the previous release."""
        return method(self, update, context)

    return adapted


def _with_empty_memory(method: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    def adapted(self: Any, update: Any, context: Any) -> Any:
        """Call the method that replaces the method of the previous release."""
        warnings.warn(f"`{old}` is a method of hf_federated 0.1. Call `{new}`.", FutureWarning, stacklevel=2)
        return method(self, update, context, {})

    return adapted
