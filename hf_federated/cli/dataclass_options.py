"""Command line options that correspond to the fields of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import typing
from typing import Any

from hf_federated.experiments.recipe.schema import argument_help


def add_dataclass_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """
    Add a group with one option per field of a dataclass, such as `--num-clients` for `num_clients`.

    The help of an option is the first sentence of the argument in the class docstring.

    Args:
        parser (`argparse.ArgumentParser`): The parser to extend.
        cls (`type`): A dataclass with an `Args:` section in its docstring. Fields that a command line cannot
            represent, such as functions and other objects, have no option.
    """
    group = parser.add_argument_group(f"options of {cls.__name__}", (inspect.getdoc(cls) or "").split("\n\n")[0])
    texts = argument_help(cls)
    for field, annotation in option_types(cls).items():
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        required = value is dataclasses.MISSING
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        default = "" if required or value is None else f" (default {shown})"
        options: dict[str, Any] = {"help": (texts.get(field.name, "") + default).replace("%", "%%")}
        if annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(annotation) is list:
            (options["type"],) = typing.get_args(annotation)
            options |= {"nargs": "+", "metavar": field.name.rstrip("s").upper()}
        else:
            options |= {"type": annotation, "metavar": field.name.upper() if annotation is str else "NUMBER"}
        group.add_argument(
            f"--{field.name.replace('_', '-')}", required=required, default=argparse.SUPPRESS, **options
        )


def build_from_options(cls: type, arguments: argparse.Namespace) -> Any:
    """Create an instance of the dataclass from the given options. Other fields keep their defaults."""
    given = vars(arguments)
    return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given})


def option_types(cls: type) -> dict[dataclasses.Field, Any]:
    """The fields that a command line supports, with `bool`, `int`, `float`, `str`, `list[str]` or `list[int]`."""
    hints = typing.get_type_hints(cls)
    fields = {field: _option_type(hints[field.name]) for field in dataclasses.fields(cls)}
    return {field: annotation for field, annotation in fields.items() if annotation is not None}


def _option_type(annotation: Any) -> Any:
    """The type of an option for this annotation, or `None` if a command line cannot represent the type."""
    choices = [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        choices = [choice for choice in typing.get_args(annotation) if choice is not type(None)]
    for choice in choices:
        if choice in (bool, int, float):
            return choice
    if any(str(choice).startswith(("collections.abc.Sequence[str]", "list[str]")) for choice in choices):
        return list[str]
    if list[int] in choices:
        return list[int]
    return str if str in choices else None
