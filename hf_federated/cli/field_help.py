"""The help of recipe fields, printed by `hf-federated train --help` and `hf-federated benchmark --help`."""

from __future__ import annotations

import textwrap
from typing import Any

from hf_federated.experiments.grid import BenchmarkSection
from hf_federated.experiments.recipe import choices, sections
from hf_federated.experiments.recipe_schema import RecipeField, dataclass_fields, type_name


INTRODUCTIONS = {
    "model": "the model that every client starts from",
    "data": "the rows, and which of them are held out to test on",
    "task": "a task of hf_federated.tasks, by its name, and its arguments",
    "partition": "a partitioner, by its name, and its arguments; left out for data that belong to clients already",
    "training": "any field of transformers.TrainingArguments; a step of the run is a round",
    "federation": "any field of hf_federated.FederatedConfig",
    "split": "in place of federation: any field of hf_federated.SplitConfig; a step of the run is an optimizer step",
    "card": "any argument of Trainer.create_model_card",
    "public": "training rows that are set aside for distillation",
    "": "beside the sections",
}


def _describe(section: str, item: RecipeField) -> str:
    """One field as two or more lines of help: name, type and default, then what it is."""
    default = "required" if item.required else f"default {_as_yaml(item.default)}"
    head = f"    {f'{section}.' if section else ''}{item.name}: {type_name(item.annotation)} ({default})"
    lines = textwrap.wrap(head, 100, subsequent_indent=" " * 8)
    # The first sentence; TrainingArguments go on for paragraphs.
    sentence = " ".join(item.help.split()).partition(". ")[0].rstrip(".")
    if sentence:
        lines += textwrap.wrap(sentence, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _as_yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false", "": '""'}
    return words[value] if isinstance(value, (bool, str, type(None))) and value in words else str(value)


def recipe_help() -> str:
    """Every section and field of a recipe with its type and default, as `--help` prints them."""
    parts = ["fields of a recipe (each can be given with --set):"]
    for section, fields in sections().items():
        parts.append(f"\n  {section or 'other fields'}: {INTRODUCTIONS[section]}")
        parts += [_describe(section, item) for item in fields.values()]
    for section, classes in choices().items():
        parts.append(f"\n  {section}: {INTRODUCTIONS[section]}")
        parts.append(f"    {section}.name: {' | '.join(classes)}")
        for name, fields in classes.items():
            parts.append(f"\n    with {section}.name: {name}")
            parts += [_describe(section, item) for item in fields.values()]
    return "\n".join(parts)


def benchmark_help() -> str:
    """Every field of a recipe's section `benchmark`, as `--help` prints them."""
    fields = dataclass_fields(BenchmarkSection).values()
    return "\n".join(["fields of the section benchmark:", *(_describe("benchmark", item) for item in fields)])
