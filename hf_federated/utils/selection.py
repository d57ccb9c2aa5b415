"""Selections of a model's tensors: a pattern, several patterns or a function.

A pattern is compared with the complete name of a tensor, as `model.named_parameters()` and `model.named_buffers()`
give it. `*` matches any text including dots, `?` one character and `[ab]` one of the characters (`fnmatch`). Upper and
lower case differ. Several patterns select the tensors that match one of them.

This module imports no torch, so that a configuration can be checked quickly.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias


# `function(name, tensor)` returns whether the tensor is selected.
Predicate: TypeAlias = Callable[[str, Any], bool]
Selection: TypeAlias = "str | Sequence[str] | Predicate"

# Start of the text that replaces a function in a saved configuration. No name of a tensor starts like this.
SAVED_FUNCTION = "function "


def check_selection(field: str, value: Any) -> Any:
    """
    Check a selection.

    Args:
        field (`str`): Name of the field, for errors.
        value (`Any`): The selection.

    Returns:
        `str`, `list[str]` or `Callable`: The selection. A list with one pattern becomes the pattern.

    Raises:
        ValueError: If the value is not a selection, or if it is the text that replaces a function in a file.
    """
    if callable(value) and not isinstance(value, type):
        return value
    patterns = [value] if isinstance(value, str) else value
    if (
        not isinstance(patterns, (list, tuple))
        or not patterns
        or not all(isinstance(pattern, str) and pattern for pattern in patterns)
    ):
        raise ValueError(
            f"`{field}` is {value!r}; set a pattern such as 'classifier*', a list of patterns, or a function of the "
            "name and the tensor."
        )
    for pattern in patterns:
        if pattern.startswith(SAVED_FUNCTION):
            raise ValueError(
                f"`{field}` is {pattern!r}, the name of a function that a file cannot contain. Pass the function in "
                "code, or use patterns."
            )
    return patterns[0] if len(patterns) == 1 else list(patterns)


def select(field: str, selection: Selection, tensors: Mapping[str, Any]) -> list[str]:
    """
    Select tensors.

    Args:
        field (`str`): Name of the field, for errors.
        selection (`str`, `Sequence[str]` or `Callable`): The selection.
        tensors (`Mapping[str, torch.Tensor]`): The tensors to select from, by name.

    Returns:
        `list[str]`: Names of the selected tensors, in the order of `tensors`.

    Raises:
        ValueError: If a pattern matches no tensor, or a function selects none. The message contains a name.

    Example:

    ```python
    >>> from hf_federated.utils.selection import select

    >>> select("keep_local", ["*.bias", "head*"], dict.fromkeys(["body.weight", "body.bias", "head.weight"]))
    ['body.bias', 'head.weight']
    ```
    """
    if callable(selection):
        found = [name for name, tensor in tensors.items() if selection(name, tensor)]
        if not found:
            raise ValueError(
                f"The function `{field}` selects no tensor that a client can train. It must return True for some "
                f"names, such as {next(iter(tensors), '')!r}."
            )
        return found
    patterns = [selection] if isinstance(selection, str) else selection
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in tensors):
            similar = difflib.get_close_matches(pattern, tensors, n=1, cutoff=0)
            raise ValueError(
                f"The pattern {pattern!r} of `{field}` matches no tensor that a client can train. A pattern matches "
                f"complete names, such as {', '.join(map(repr, similar))}, and `*` matches any text."
            )
    return [name for name in tensors if any(fnmatchcase(name, pattern) for pattern in patterns)]
