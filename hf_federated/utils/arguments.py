"""Checks of the values of arguments and settings."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def require(name: str, value: Any, is_allowed: bool, allowed: str) -> None:
    """
    Raise an error if an argument has a value that is not allowed.

    Args:
        name (`str`): Name of the argument.
        value (`Any`): Value of the argument.
        is_allowed (`bool`): Whether the value is allowed.
        allowed (`str`): The allowed values, for the message "it must be ...".

    Raises:
        ValueError: If the value is not allowed.

    Example:

    ```python
    >>> from hf_federated.utils.arguments import require

    >>> require("server_lr", 0.5, 0.5 > 0, "positive")
    ```
    """
    if not is_allowed:
        raise ValueError(f"`{name}` is {value!r}; it must be {allowed}.")


def require_count(name: str, value: Any, smallest: int) -> None:
    """
    Raise an error if an argument is no integer, or smaller than allowed.

    Args:
        name (`str`): Name of the argument.
        value (`Any`): Value of the argument.
        smallest (`int`): Smallest allowed value.

    Raises:
        ValueError: If the value is not allowed.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(name, value, is_integer and value >= smallest, f"at least {smallest} and an integer")


def require_one_of(name: str, value: Any, allowed: Collection[str]) -> None:
    """
    Raise an error if an argument is none of the allowed names.

    Args:
        name (`str`): Name of the argument.
        value (`Any`): Value of the argument.
        allowed (`Collection[str]`): The allowed names.

    Raises:
        ValueError: If the value is not one of the allowed names.
    """
    if value not in allowed:
        raise ValueError(f"`{name}` is {value!r}; allowed are {', '.join(map(repr, allowed))}.")
