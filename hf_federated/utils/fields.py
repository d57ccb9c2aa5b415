"""Checks of the fields of dataclasses against their annotations: type, range and size.

The checks apply to values that another party or a file provides: messages, headers, configurations, recipes and
indexes of datasets. A field declares the allowed values with its annotation. `Annotated` adds constraints:

```python
num_examples: Count
metrics: Annotated[dict[str, float], MaxEntries(10)]
```

An annotation is built from `bool`, `int`, `float`, `str`, `torch.Tensor`, `list`, `Sequence`, `dict`, `Literal`,
`Any`, enumerations and unions of these. The types are compared exactly: `True` is not an `int`. An integer is a valid
`float`. `Any` is a value of JSON. The checks of a class are built once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


if TYPE_CHECKING:
    ShareOrCount = int | float
else:

    class ShareOrCount:
        """Parse a share with a decimal point (`0.5`, `1.0`) as `float` and a count (`10`, `1`) as `int`.

        `HfArgumentParser` calls this class on the text of a command line. For a union of `int` and `float`, it would
        parse `1` as `1.0`, which means all clients instead of one client.
        """

        def __new__(cls, text: str) -> int | float:
            return float(text) if any(mark in text.lower() for mark in ".e") else int(text)


class Constraint:
    """Base class of the constraints that `Annotated` adds to a type."""

    def problem(self, value: Any) -> str | None:
        """Return the violated constraint. The value has the annotated type."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(Constraint):
    """Smallest and largest value of a number, both included."""

    smallest: float
    largest: float

    def problem(self, value: Any) -> str | None:
        if self.smallest <= value <= self.largest:
            return None
        return f"is {value}, expected a number between {self.smallest:g} and {self.largest:g}"


@dataclass(frozen=True)
class MaxEntries(Constraint):
    """Largest number of entries of a list or dictionary, or of characters of a text."""

    number: int

    def problem(self, value: Any) -> str | None:
        return None if len(value) <= self.number else f"has {len(value)} entries, at most {self.number} are allowed"


@dataclass(frozen=True)
class TensorOf(Constraint):
    """
    Dtype of a tensor.

    Args:
        dtype (`torch.dtype`): The dtype.
        ndim (`int`, *optional*): Number of dimensions. By default any number is allowed.
    """

    dtype: Any
    ndim: int | None = None

    def problem(self, value: Any) -> str | None:
        if value.dtype == self.dtype and self.ndim in (None, value.ndim):
            return None
        dimensions = "" if self.ndim is None else f" with {self.ndim} dimensions"
        return f"must be {self.dtype}{dimensions}, but is {describe(value)}"


@dataclass(frozen=True)
class Requirement:
    """
    The allowed values in words, for errors.

    Args:
        text (`str`): The predicate of a sentence about the field, such as `"must be an int"`.
    """

    text: str


MAX_INTEGER = 2**64 - 1
# A float64 represents each integer up to this one.
MAX_COUNT = 2**53
MAX_METRICS = 10_000
MAX_NAME_LENGTH = 1_000
MAX_TEXT_LENGTH = 100_000
MAX_JSON_DEPTH = 8
# Number of characters of an invalid text that an error shows.
MAX_SHOWN_LENGTH = 80

# A number of examples, tokens, steps, rounds, ...
Count = Annotated[int, Range(0, MAX_COUNT)]
PositiveCount = Annotated[int, Range(1, MAX_COUNT)]
# A text for the log.
ShortText = Annotated[str, MaxEntries(1_000)]
# A seed that torch and numpy accept.
Seed = Annotated[int, Range(0, 2**32 - 1)]


# Returns what is wrong with a value, as the predicate of a sentence, or `None`.
Check = Callable[[Any], str | None]


def check_fields(instance: Any, prefix: str = "") -> None:
    """
    Check the values of a dataclass against the annotations of its fields.

    Args:
        instance (`Any`): Instance of a dataclass.
        prefix (`str`, *optional*, defaults to `""`): Start of the message of an error.

    Raises:
        ValueError: If a field has a value of another type, out of range, or with too many entries. The message names
            the field.
    """
    check_values(type(instance), vars(instance), prefix)


def check_values(cls: Any, values: Mapping[str, Any], prefix: str = "") -> None:
    """
    Check values by field before an instance of `cls` is built, as [`check_fields`]. Absent fields are not checked.
    """
    for name, check in checks_of(cls).items():
        if name in values and (problem := check(values[name])) is not None:
            raise ValueError(f"{prefix}`{name}` {problem}.")


def problems_of(instance: Any) -> dict[str, str]:
    """
    Find the fields of a dataclass whose values the annotations do not allow.

    Args:
        instance (`Any`): Instance of a dataclass.

    Returns:
        `dict[str, str]`: What is wrong with each invalid field, as the predicate of a sentence, by field.
    """
    cls: Any = type(instance)
    return {
        name: problem
        for name, check in checks_of(cls).items()
        if (problem := check(getattr(instance, name))) is not None
    }


@functools.cache
def checks_of(cls: Any) -> dict[str, Check]:
    """Return the check of each field of a dataclass by name."""
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: check_of(hints[item.name]) for item in dataclasses.fields(cls)}


def check_of(annotation: Any) -> Check:
    """
    Return the check of the values that an annotation allows.

    Args:
        annotation (`Any`): The annotation of a field.

    Returns:
        `Callable[[Any], str | None]`: Returns what is wrong with a value, as the predicate of a sentence, or `None`.

    Example:

    ```python
    >>> from hf_federated.utils.fields import check_of

    >>> check_of(int | None)("3")
    'is a value of type str, expected int'
    ```
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _check_of_annotated(check_of(arguments[0]), arguments[1:], is_integer=arguments[0] is int)
    if origin in (Union, types.UnionType):
        # A union of an enumeration and `str` allows only the values of the enumeration.
        left_out = [type(None), str] if any(map(is_enum, arguments)) else [type(None)]
        checks = [check_of(option) for option in arguments if option not in left_out]
        return _check_of_union(checks, allows_none=type(None) in arguments)
    if annotation is ShareOrCount:
        return _check_of_scalar(float)
    if origin is Literal or is_enum(annotation):
        return _check_of_options(arguments or [item.value for item in annotation])
    if origin is dict:
        return _check_of_dict(*arguments)
    if origin in (list, Sequence):
        entry = check_of(arguments[0])
        allowed = (list,) if origin is list else (list, tuple)
        return lambda value: _problem_of_list(value, allowed, entry)
    if annotation is Any:
        return lambda value: _problem_of_json(value, MAX_JSON_DEPTH)
    if origin is not None:
        # Another generic type, in the message of a user. Its entries are not checked.
        return lambda value: (
            None if isinstance(value, origin) else f"is {_type_name(value)}, expected {origin.__name__}"
        )
    if annotation is None:
        return _check_of_scalar(type(None))
    return _check_of_tensor() if annotation is _torch("Tensor") else _check_of_scalar(annotation)


def is_enum(annotation: Any) -> bool:
    """Whether an annotation is an enumeration."""
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def describe(value: Any) -> str:
    """Describe an invalid value for an error, in a few words."""
    if type(value) is str:
        return repr(value[:MAX_SHOWN_LENGTH])
    if value is None or type(value) is bool or (type(value) is int and abs(value) <= MAX_INTEGER):
        return repr(value)
    if (tensor_type := _torch("Tensor")) and isinstance(value, tensor_type):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}"
    return f"{sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


def _torch(name: str) -> Any:
    """Return an attribute of torch, or `None` if torch is not imported: recipes are checked without torch."""
    return getattr(sys.modules.get("torch"), name, None)


def _check_of_annotated(check: Check, metadata: Sequence[Any], is_integer: bool) -> Check:
    constraints = [item for item in metadata if isinstance(item, Constraint)]
    for constraint in constraints:
        check = _both(check, constraint.problem)
    for item in metadata:
        if isinstance(item, Requirement):
            check = _with_requirement(check, item)
    if is_integer and len(constraints) == 1 and isinstance(constraints[0], Range):
        return _check_of_count(constraints[0], check)
    return check


def _both(first: Check, second: Check) -> Check:
    return lambda value: first(value) or second(value)


def _with_requirement(check: Check, requirement: Requirement) -> Check:
    return lambda value: None if check(value) is None else f"{requirement.text}, but is {describe(value)}"


def _check_of_count(limits: Range, check: Check) -> Check:
    # Most fields of messages are counts, so a valid count takes one comparison.
    smallest, largest = limits.smallest, limits.largest
    return lambda value: None if type(value) is int and smallest <= value <= largest else check(value)


def _check_of_union(checks: Sequence[Check], allows_none: bool) -> Check:
    def check_options(value: Any) -> str | None:
        if value is None and allows_none:
            return None
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
        if kind is int:
            return None if -MAX_INTEGER <= value <= MAX_INTEGER else "is an integer of more than 64 bits"
        return (
            None if kind is not str or (value.isascii() and len(value) <= MAX_NAME_LENGTH) else _problem_of_text(value)
        )

    return check_scalar


def _check_of_options(options: Sequence[Any]) -> Check:
    def check_options(value: Any) -> str | None:
        # `1` equals `True`, so the types are compared, too.
        if any(type(value) is type(option) and value == option for option in options):
            return None
        return f"must be {' or '.join(map(str, options))}, but is {describe(value)}"

    return check_options


def _check_of_tensor() -> Check:
    tensor_type, strided = _torch("Tensor"), _torch("strided")

    def check_tensor(value: Any) -> str | None:
        is_dense = isinstance(value, tensor_type) and value.layout is strided
        return None if is_dense else f"is {_type_name(value)}, expected a tensor"

    return check_tensor


def _problem_of_text(value: str) -> str | None:
    if len(value) > MAX_TEXT_LENGTH:
        return f"has {len(value)} characters, at most {MAX_TEXT_LENGTH} are allowed"
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        # A lone surrogate, which cannot be written to a log.
        return "is not valid Unicode"
    return None


def _check_of_dict(key_type: Any, item_type: Any) -> Check:
    check_key, check_item = check_of(key_type), check_of(item_type)
    # Most dictionaries have short ASCII names, and tensors or floats. All others are checked item by item.
    has_tensors, strided = item_type is _torch("Tensor"), {_torch("strided")}
    has_plain_items = key_type is str and (has_tensors or item_type is float)
    layout_of = operator.attrgetter("layout")

    def check_dict(value: Any) -> str | None:
        if type(value) is not dict:
            return f"is {_type_name(value)}, expected dict"
        is_plain = (
            has_plain_items
            and set(map(type, value)) <= {str}
            and all(map(str.isascii, value))
            and max(map(len, value), default=0) <= MAX_NAME_LENGTH
            and set(map(type, value.values())) <= {item_type}
            and (not has_tensors or set(map(layout_of, value.values())) <= strided)
        )
        return None if is_plain else _problem_of_dict(value, check_key, check_item)

    return check_dict


def _problem_of_dict(value: dict[Any, Any], check_key: Check, check_item: Check) -> str | None:
    for key, item in value.items():
        if (problem := check_key(key)) is not None:
            return f"has a key that {problem}"
        if type(key) is str and len(key) > MAX_NAME_LENGTH:
            return f"has a key of {len(key)} characters, at most {MAX_NAME_LENGTH} are allowed"
        if (problem := check_item(item)) is not None:
            return f"has a value that is invalid: {key!r} {problem}"
    return None


def _problem_of_list(value: Any, allowed: Sequence[type], check_item: Check) -> str | None:
    if type(value) not in allowed:
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


def _type_name(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
