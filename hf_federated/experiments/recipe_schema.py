"""The fields that a section of a recipe may have, with types, defaults and help, and the check of what was written."""

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
    """A recipe that cannot be run. The message is one line: what was given, and what is allowed."""


@dataclass(frozen=True)
class RecipeField:
    """One field of a recipe as `--help` and the checks need it."""

    name: str
    annotation: Any
    default: Any
    help: str = ""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING


def dataclass_fields(cls: type) -> dict[str, RecipeField]:
    """The fields of a dataclass, with the help of their metadata or else of the class's docstring."""
    annotations, texts = typing.get_type_hints(cls), argument_texts(cls)
    fields = {}
    for item in dataclasses.fields(cls):
        default = item.default
        if default is dataclasses.MISSING and item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        help_text = item.metadata.get("help") or texts.get(item.name, "")
        fields[item.name] = RecipeField(item.name, annotations[item.name], default, help_text)
    return fields


def argument_texts(cls: type) -> dict[str, str]:
    """The texts of a docstring's `Args:`, the first sentence of each."""
    documentation = inspect.getdoc(cls) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", documentation, flags=re.DOTALL | re.MULTILINE)
    entries = re.split(r"^    (\w+) \([^\n]*?\):", section.group(1) if section else "", flags=re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in zip(entries[1::2], entries[2::2], strict=True)}
    return {name: re.split(r"(?<=\.) ", text)[0].rstrip(".").replace("`", "") for name, text in texts.items()}


def type_name(annotation: Any) -> str:
    """A type as a person reads it: `int or float`, `list of str`, the choices of an enumeration."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        writable = [item for item in arguments if item is not type(None) and not _is_function(item)]
        choices = [type_name(item) for item in writable if _is_enum(item)]
        # An enumeration says more than the `str` beside it.
        kept = choices or list(dict.fromkeys(type_name(item) for item in writable))
        return " or ".join(kept + (["null"] if type(None) in arguments else []))
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


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value read from YAML may be given to a field of this type. Whole numbers pass for floats."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        # Where an enumeration stands beside `str`, only its own values are meant.
        enums = [item for item in arguments if _is_enum(item)]
        return any(fits(value, item) for item in arguments if not (enums and item is str))
    if origin is Literal:
        return value in arguments
    if origin in (list, tuple, Sequence):
        return isinstance(value, (list, tuple)) and all(fits(item, arguments[0]) for item in value)
    if origin is dict or annotation is dict:
        return isinstance(value, dict)
    if _is_enum(annotation):
        return value in [item.value for item in annotation]
    if annotation is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    # Anything else is a class or a function (say, accelerate's ParallelismConfig) that YAML cannot write.
    return isinstance(annotation, type) and isinstance(value, annotation)


def check_section(name: str, values: Any, fields: dict[str, RecipeField]) -> dict[str, Any]:
    """
    What was written in a section, if every name and type in it is right.

    Args:
        name (`str`): The section; `""` for what stands beside the sections.
        values (`Any`): What was read from YAML.
        fields (`dict[str, RecipeField]`): The fields that the section may have.

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
            raise unknown_field(f"{prefix}{key}", str(key), list(fields))
        if not fits(value, fields[key].annotation):
            raise RecipeError(
                f"{prefix}{key} is {value!r} ({type(value).__name__}); it must be {type_name(fields[key].annotation)}."
            )
    for key, item in fields.items():
        if item.required and key not in values:
            raise RecipeError(f"{prefix}{key} is missing; it must be {type_name(item.annotation)}: {item.help}")
    return values


def unknown_field(given: str, key: str, known: list[str]) -> RecipeError:
    """The error for a name that is not a field, with those it may have been meant to be."""
    near = difflib.get_close_matches(key, known, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    listed = ", ".join(known) if len(known) <= 30 else "the fields that `hf-federated train --help` lists"
    return RecipeError(f"{given} is not a field of a recipe; {hint}Allowed: {listed}.")
