"""Checks of the fields of messages: type, range and size.

A message declares the allowed values with the annotations of its fields. `Annotated` adds a range or a number of
entries:

```python
num_examples: Count
metrics: Annotated[dict[str, float], MaxEntries(10)]
```

An annotation is built from `bool`, `int`, `float`, `str`, `torch.Tensor`, `list`, `dict`, `Any` and unions of these.
`Any` is a value of JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch


@dataclass(frozen=True)
class Range:
    """Smallest and largest value of a number, both included."""

    smallest: float
    largest: float


@dataclass(frozen=True)
class MaxEntries:
    """Largest number of entries of a list or dictionary, or of characters of a text."""

    number: int


# A float64 represents each integer up to this one.
MAX_COUNT = 2**53
MAX_METRICS = 10_000
MAX_NAME_LENGTH = 1_000
MAX_TEXT_LENGTH = 100_000
MAX_JSON_DEPTH = 8

# A number of examples, tokens, steps, rounds, ...
Count = Annotated[int, Range(0, MAX_COUNT)]
# A text for the log.
ShortText = Annotated[str, MaxEntries(1_000)]
# A seed that torch and numpy accept.
Seed = Annotated[int, Range(0, 2**32 - 1)]
# Values may be NaN or infinite, such as the loss of a client that has diverged.
MetricValues = Annotated[dict[str, float], MaxEntries(MAX_METRICS)]


# Returns what is wrong with a value, as the predicate of a sentence, or `None`.
Check = Callable[[Any], str | None]


def check_fields(message: Any) -> None:
    """
    Check the values of a dataclass against the annotations of its fields.

    Args:
        message (`Any`): Instance of a dataclass.

    Raises:
        ValueError: If a field has a value of another type, out of range, or with too many entries. The message names
            the field.
    """
    cls: Any = type(message)
    for name, check in _checks_of(cls):
        problem = check(getattr(message, name))
        if problem is not None:
            raise ValueError(f"`{name}` {problem}.")


@functools.cache
def _checks_of(cls: type) -> list[tuple[str, Check]]:
    """Return the name and the check of each field of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    return [(item.name, _check_of(hints[item.name])) for item in dataclasses.fields(cls)]


def _check_of(annotation: Any) -> Check:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _check_of_annotated(_check_of(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        return _check_of_union([_check_of(option) for option in arguments])
    if origin is dict:
        key, item = map(_check_of, arguments)
        return lambda value: _problem_of_dict(value, key, item)
    if origin is list:
        entry = _check_of(arguments[0])
        return lambda value: _problem_of_list(value, entry)
    if annotation is Any:
        return lambda value: _problem_of_json(value, MAX_JSON_DEPTH)
    if origin is not None:
        # Another generic type, in the message of a user. Its entries are not checked.
        return lambda value: (
            None if isinstance(value, origin) else f"is {_type_name(value)}, expected {origin.__name__}"
        )
    if annotation is torch.Tensor:
        return _problem_of_tensor
    return _check_of_scalar(type(None) if annotation is None else annotation)


def _check_of_annotated(check: Check, constraints: Sequence[Any]) -> Check:
    def check_with_constraints(value: Any) -> str | None:
        return check(value) or _violated(value, constraints)

    return check_with_constraints


def _check_of_union(checks: Sequence[Check]) -> Check:
    def check_options(value: Any) -> str | None:
        # The first option is the usual one, as `int` in `int | None`.
        first = checks[0](value)
        return None if first is None or any(check(value) is None for check in checks[1:]) else first

    return check_options


def _check_of_scalar(expected: type) -> Check:
    # `bool` is a subclass of `int`, so the types are compared exactly. An integer is a valid float.
    allowed = (int, float) if expected is float else (expected,)

    def check_scalar(value: Any) -> str | None:
        kind = type(value)
        if kind not in allowed:
            return f"is {_type_name(value)}, expected {expected.__name__}"
        if kind is int and abs(value) >= 2**64:
            return "is an integer of more than 64 bits"
        return _problem_of_text(value) if kind is str else None

    return check_scalar


def _problem_of_tensor(value: Any) -> str | None:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return None if is_dense else f"is {_type_name(value)}, expected a tensor"


def _problem_of_text(value: str) -> str | None:
    if len(value) > MAX_TEXT_LENGTH:
        return f"has {len(value)} characters, at most {MAX_TEXT_LENGTH} are allowed"
    try:
        value.encode()
    except UnicodeEncodeError:
        # A lone surrogate, which cannot be written to a log.
        return "is not valid Unicode"
    return None


def _problem_of_dict(value: Any, check_key: Check, check_item: Check) -> str | None:
    if type(value) is not dict:
        return f"is {_type_name(value)}, expected dict"
    for key, item in value.items():
        if (problem := check_key(key)) is not None:
            return f"has a key that {problem}"
        if type(key) is str and len(key) > MAX_NAME_LENGTH:
            return f"has a key of {len(key)} characters, at most {MAX_NAME_LENGTH} are allowed"
        if (problem := check_item(item)) is not None:
            return f"has a value that is invalid: {key!r} {problem}"
    return None


def _problem_of_list(value: Any, check_item: Check) -> str | None:
    if type(value) is not list:
        return f"is {_type_name(value)}, expected list"
    found = next((problem for problem in map(check_item, value) if problem is not None), None)
    return None if found is None else f"has an item that {found}"


def _problem_of_json(value: Any, depth: int) -> str | None:
    if depth == 0:
        return f"is nested more than {MAX_JSON_DEPTH} levels deep"
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            return "has a key that is not a text"
        problems = (_problem_of_json(item, depth - 1) for item in value.values())
    elif isinstance(value, (list, tuple)):
        problems = (_problem_of_json(item, depth - 1) for item in value)
    else:
        if type(value) is str:
            return _problem_of_text(value)
        is_scalar = value is None or isinstance(value, (bool, int, float))
        return None if is_scalar else f"is {_type_name(value)}, expected a value of JSON"
    return next((problem for problem in problems if problem is not None), None)


def _violated(value: Any, constraints: Sequence[Any]) -> str | None:
    """Return the violated constraint. The value has the declared type."""
    for constraint in constraints:
        if isinstance(constraint, Range) and not constraint.smallest <= value <= constraint.largest:
            return f"is {value}, expected a number between {constraint.smallest:g} and {constraint.largest:g}"
        if isinstance(constraint, MaxEntries) and len(value) > constraint.number:
            return f"has {len(value)} entries, at most {constraint.number} are allowed"
    return None


def _type_name(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
