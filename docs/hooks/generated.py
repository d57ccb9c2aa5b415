"""The generated parts of the reference: fields of a recipe, help of the commands, and rules of compatibility."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
from collections.abc import Iterable
from typing import Any
from unittest import mock


def recipe_fields() -> str:
    """A table of fields for each section of a recipe."""
    from hf_federated.cli.field_help import INTRODUCTIONS
    from hf_federated.experiments.benchmark.grid import BenchmarkSection
    from hf_federated.experiments.recipe.fields import named_section_fields, section_fields
    from hf_federated.experiments.recipe.schema import dataclass_fields

    parts = []
    for section, classes in named_section_fields().items():
        parts.append(f"## `{section}`\n\n{sentence(INTRODUCTIONS[section])}")
        for name, fields in classes.items():
            heading = f"### `{section}.name: {name}`"
            parts.append(f"{heading}\n\n{field_table(fields.values()) or 'This class has no arguments.'}")
    others = section_fields()
    top_level = others.pop("")
    long = {name: others.pop(name) for name in ("training",)}
    head = [f"## Top level\n\n{field_table(top_level.values())}"]
    head += [section_text(name, INTRODUCTIONS[name], fields.values()) for name, fields in others.items()]
    tail = [
        section_text("benchmark", "the runs of `hf-federated benchmark`", dataclass_fields(BenchmarkSection).values())
    ]
    tail += [section_text(name, INTRODUCTIONS[name], fields.values()) for name, fields in long.items()]
    return "\n\n".join([*head, *parts, *tail])


def section_text(name: str, introduction: str, fields: Iterable[Any]) -> str:
    """Heading, introduction and table of a section."""
    return f"## `{name}`\n\n{sentence(introduction)}\n\n{field_table(fields)}"


def sentence(text: str) -> str:
    """A phrase of the command line's help as a sentence."""
    text = re.sub(r"\bhf_federated\.(\w+Config)\b", r"[`\1`]", text)
    text = re.sub(r"\b((?:hf_federated|transformers|Trainer)\.[\w.]+\w)", r"`\1`", text)
    return f"{text[0].upper()}{text[1:]}."


def field_table(fields: Iterable[Any]) -> str:
    """A Markdown table of `RecipeField`s."""
    from hf_federated.experiments.recipe.schema import type_name

    lines = []
    for field in fields:
        default = "required" if field.required else f"`{as_yaml(field.default)}`"
        if field.default is ...:
            default = "computed"  # by the library
        # The help of TrainingArguments has several paragraphs; the first sentence describes the field.
        text = " ".join(field.help.split()).partition(". ")[0].rstrip(".")
        lines.append(f"| `{field.name}` | {cell(type_name(field.annotation))} | {default} | {cell(text)} |")
    return "\n".join(["| field | type | default | description |", "|---|---|---|---|", *lines]) if lines else ""


def cell(text: str) -> str:
    """Text that is safe in a cell of a table."""
    escaped = {"|": "\\|", "<": "&lt;", "*": "\\*", "{": "&#123;"}  # Braces are attributes of Markdown's attr_list.
    return "".join(escaped.get(character, character) for character in text)


def as_yaml(value: Any) -> str:
    """A default value as it is written in a recipe."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if dataclasses.is_dataclass(value) or callable(value):
        return type(value).__name__
    # Quotes show line breaks and spaces at the end.
    return json.dumps(value) if isinstance(value, str) and value != value.strip() or value == "" else str(value)


def algorithms(package: str) -> str:
    """A table of the names in a dictionary of classes such as `AGGREGATIONS`, with links to the classes."""
    import hf_federated

    classes = getattr(hf_federated, f"{package.upper()}S")
    lines = [f"| `{name}` | [`{cls.__name__}`] |" for name, cls in classes.items()]
    return "\n".join([f"| `{package}` | class |", "|---|---|", *lines])


def compatibility() -> str:
    """A table for each group of features: the features that a feature of the group does not work with."""
    from hf_federated.compatibility import GROUPS, RULES

    parts = []
    for group in GROUPS:
        lines = [
            f"| {feature_text(own)} | {feature_text(other)} | {cell(rule.reason)} | {cell(rule.alternative)} |"
            for rule in RULES
            for own, other in ((rule.first, rule.second), (rule.second, rule.first))
            if own.group == group and (own is rule.first or rule.first.group != group)
        ]
        head = "| feature | does not work with | because | instead |\n|---|---|---|---|"
        parts.append("\n".join([f"## {group}\n", head, *lines]))
    return "\n\n".join(parts)


def feature_text(feature: Any) -> str:
    """A feature with the names of the registered methods that have it."""
    names = feature.registered
    return cell(f"{feature.name}: {', '.join(f'`{name}`' for name in names)}" if names else feature.name)


def commands() -> str:
    """The help of each command, and the options of each partitioner."""
    from hf_federated.data.partitioners import PARTITIONERS

    parts = []
    for command in command_names():
        text = help_of(command).partition("\nfields of ")[0].rstrip()
        parts.append(f"## `hf-federated {command}`\n\n```text\n{text}\n```")
        if command in ("train", "benchmark"):
            parts.append("The fields of a recipe are listed in [Recipes](recipes.md).")
        if command == "partition":
            for name in PARTITIONERS:
                options = help_of(command, "--partitioner", name)
                group = options[options.index("\noptions of ") :].strip()
                parts.append(f"### `--partitioner {name}`\n\n```text\n{group}\n```")
    return "\n\n".join(parts)


def command_names() -> list[str]:
    """The names of all commands, from the help of `hf-federated`."""
    names = re.search(r"{([\w,-]+)}", help_of())
    assert names is not None
    return names[1].split(",")


def help_of(*arguments: str) -> str:
    """The text that `hf-federated … --help` prints."""
    from hf_federated.cli.main import main

    output = io.StringIO()
    # argparse breaks lines at the width of the terminal.
    with mock.patch.dict(os.environ, {"COLUMNS": "96"}), contextlib.redirect_stdout(output):
        with contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
    return output.getvalue()
