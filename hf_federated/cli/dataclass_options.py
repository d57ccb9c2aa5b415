"""Options of a command that are the fields of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import types
import typing
from typing import Any

from hf_federated.experiments.recipe_schema import argument_texts


def add_dataclass_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """
    Adds an option for each field: `num_clients` becomes `--num-clients`, with the docstring's text as its help.

    Args:
        parser (`argparse.ArgumentParser`): Gets a group of options.
        cls (`type`): A dataclass with the docstring of this project. Fields that a command line cannot write
            (functions, other objects) have no option.
    """
    group = parser.add_argument_group(f"options of {cls.__name__}", (inspect.getdoc(cls) or "").split("\n\n")[0])
    texts = argument_texts(cls)
    for field, annotation in writable_fields(cls).items():
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
    """An object of the dataclass from the options that were given; the others keep their defaults."""
    given = vars(arguments)
    return cls(**{field.name: given[field.name] for field in writable_fields(cls) if field.name in given})


def writable_fields(cls: type) -> dict[dataclasses.Field, Any]:
    """The fields that a command line can write, with `bool`, `int`, `float`, `str`, `list[str]` or `list[int]`."""
    hints = typing.get_type_hints(cls)
    fields = {field: _writable(hints[field.name]) for field in dataclasses.fields(cls)}
    return {field: annotation for field, annotation in fields.items() if annotation is not None}


def _writable(annotation: Any) -> Any:
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
