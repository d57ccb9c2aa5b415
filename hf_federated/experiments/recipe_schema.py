"""The fields that a section of a recipe accepts, and the validation of a section against these fields."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from hf_federated.experiments.errors import CommandError


class RecipeError(CommandError):
    """An invalid recipe. The one-line message states the given value and the allowed values."""


@dataclass(frozen=True)
class RecipeField:
    """
    One field of a recipe, as used by `--help` and by validation.

    Args:
        name (`str`): Name of the field.
        annotation (`Any`): Type of the field.
        default (`Any`): Default value, or `dataclasses.MISSING` for a required field.
        help (`str`, *optional*, defaults to `""`): Description of the field.
    """

    name: str
    annotation: Any
    default: Any
    help: str = ""

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING


def dataclass_fields(cls: type) -> dict[str, RecipeField]:
    """The fields of a dataclass by name. The help comes from a field's metadata or from the class docstring."""
    annotations, texts = typing.get_type_hints(cls), argument_help(cls)
    fields = {}
    for item in dataclasses.fields(cls):
        default = item.default
        if default is dataclasses.MISSING and item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        help_text = item.metadata.get("help") or texts.get(item.name, "")
        fields[item.name] = RecipeField(item.name, annotations[item.name], default, help_text)
    return fields


def argument_help(cls: type) -> dict[str, str]:
    """The first sentence of each entry in the `Args:` section of a class docstring, by argument name."""
    documentation = inspect.getdoc(cls) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", documentation, flags=re.DOTALL | re.MULTILINE)
    entries = re.split(r"^    (\w+) \([^\n]*?\):", section.group(1) if section else "", flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}
    return {name: re.split(r"(?<=\.) ", text)[0].rstrip(".").replace("`", "") for name, text in texts.items()}


def type_name(annotation: Any) -> str:
    """A readable name of a type: `int or float`, `list of str`, or the values of an enumeration."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        writable = [item for item in arguments if item is not type(None) and not _is_function(item)]
        enum_names = [type_name(item) for item in writable if _is_enum(item)]
        # In a union of an enumeration and `str`, only the enumeration is informative.
        names = enum_names or list(dict.fromkeys(type_name(item) for item in writable))
        return " or ".join(names + (["null"] if type(None) in arguments else []))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (list, tuple, Sequence):
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    if origin is dict:
        return "mapping"
    if _is_enum(annotation):
        return " | ".join(str(item.value) for item in annotation)
    words: dict[Any, str] = {Any: "any", dict: "mapping", bool: "true | false"}
    return words.get(annotation) or annotation.__name__


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Enum)


def _is_function(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.get_origin(typing.Callable[[], None])


def matches_type(value: Any, annotation: Any) -> bool:
    """Whether a value read from YAML is valid for a field of this type. Integers are valid for `float`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        # A union of an enumeration and `str` accepts only the values of the enumeration.
        enums = [item for item in arguments if _is_enum(item)]
        return any(matches_type(value, item) for item in arguments if not (enums and item is str))
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and all(matches_type(item, arguments[0]) for item in value)
    if origin is dict or annotation is dict:
        return isinstance(value, dict)
    if _is_enum(annotation):
        return value in [item.value for item in annotation]
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # Any other type is a class or a function, such as accelerate's ParallelismConfig, which YAML cannot represent.
    # In Python 3.10, a generic alias such as `Iterator[int]` is an instance of `type`, too.
    return origin is None and isinstance(annotation, type) and isinstance(value, annotation)


def check_section(name: str, values: Any, fields: dict[str, RecipeField]) -> dict[str, Any]:
    """
    Validate the names and types in a section and return the section.

    Args:
        name (`str`): Name of the section, or `""` for the top-level fields that belong to no section.
        values (`Any`): The section as read from YAML. `None` is read as an empty section.
        fields (`dict[str, RecipeField]`): The fields that the section accepts.

    Returns:
        `dict[str, Any]`: The fields that the section sets.

    Raises:
        RecipeError: If a field is unknown, missing or of the wrong type.
    """
    prefix = f"{name}." if name else ""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RecipeError(f"{name or 'the recipe'} is {values!r}; it must be a mapping of fields to values.")
    for key, value in values.items():
        if key not in fields:
            raise unknown_field_error(f"{prefix}{key}", str(key), list(fields))
        if not matches_type(value, fields[key].annotation):
            raise RecipeError(
                f"{prefix}{key} is {value!r} ({type(value).__name__}); it must be {type_name(fields[key].annotation)}."
            )
    for key, item in fields.items():
        if item.required and key not in values:
            raise RecipeError(f"{prefix}{key} is missing; it must be {type_name(item.annotation)}: {item.help}")
    return values


def check_at_least_one(field: str, value: int | None) -> None:
    """Raise [`RecipeError`] if a number of clients or examples is set and below 1."""
    if value is not None and value < 1:
        raise RecipeError(f"{field} is {value}; it must be at least 1.")


def unknown_field_error(given: str, key: str, known: list[str]) -> RecipeError:
    """
    Build the error for an unknown field, with suggestions of similar names.

    Args:
        given (`str`): The unknown field with its section.
        key (`str`): The name of the unknown field.
        known (`list[str]`): The names of the known fields.
    """
    similar = difflib.get_close_matches(key, known, n=3)
    hint = f"did you mean {' or '.join(similar)}? " if similar else ""
    allowed = ", ".join(known) if len(known) <= 30 else "the fields that `hf-federated train --help` lists"
    section = given.rpartition(".")[0]
    where = f"the section {section}" if section else "a recipe"
    return RecipeError(f"{given} is not a field of {where}; {hint}Allowed: {allowed}.")
