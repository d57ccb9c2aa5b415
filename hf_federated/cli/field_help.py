"""The help of recipe fields, printed by `hf-federated train --help` and `hf-federated benchmark --help`."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.recipe.fields import named_section_fields, section_fields
from hf_federated.experiments.recipe.schema import RecipeField, dataclass_fields, type_name


INTRODUCTIONS = {
    "model": "the initial model of every client",
    "data": "the dataset, and the part of it that is held out for testing",
    "task": "the name of a task of hf_federated.tasks, and its arguments",
    "partition": "the name of a partitioner, and its arguments; not set for federated datasets",
    "training": "any field of transformers.TrainingArguments; a step of the run is a round",
    "federation": "any field of hf_federated.FederatedConfig",
    "split": "in place of federation: any field of hf_federated.SplitConfig; a step of the run is an optimizer step",
    "card": "any argument of Trainer.create_model_card",
    "public": "the public examples and the server's examples for distillation",
    "network": "the clients on other machines, for hf-federated serve; hf-federated train ignores this section",
    "audit": "attacks on the payloads of simulated clients, after training; the card has the results",
    "": "at the top level",
}


def _describe(section: str, item: RecipeField) -> str:
    """Describe one field in two or more lines: name, type and default, then the help."""
    default = " (required)" if item.required else f" (default {_as_yaml(item.default)})"
    if item.default is ...:
        default = ""  # The library computes the default.
    head = f"    {f'{section}.' if section else ''}{item.name}: {type_name(item.annotation)}{default}"
    lines = textwrap.wrap(head, 100, subsequent_indent=" " * 8)
    # Only the first sentence, because the help of TrainingArguments has several paragraphs.
    sentence = " ".join(item.help.split()).partition(". ")[0].rstrip(".")
    if sentence:
        lines += textwrap.wrap(sentence, 100, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def _as_yaml(value: Any) -> str:
    return json.dumps(value) if value in (None, True, False, "") else str(value)


def recipe_help() -> str:
    """The sections and fields of a recipe with types and defaults, as printed by `--help`."""
    parts = ["fields of a recipe (each can be set with --set):"]
    for section, fields in section_fields().items():
        parts.append(f"\n  {section or 'other fields'}: {INTRODUCTIONS[section]}")
        parts += [_describe(section, item) for item in fields.values()]
    for section, classes in named_section_fields().items():
        parts.append(f"\n  {section}: {INTRODUCTIONS[section]}")
        parts.append(f"    {section}.name: {' | '.join(classes)}")
        for name, fields in classes.items():
            parts.append(f"\n    with {section}.name: {name}")
            parts += [_describe(section, item) for item in fields.values()]
    return "\n".join(parts)


def benchmark_help() -> str:
    """The fields of the section `benchmark` of a recipe, as printed by `--help`."""
    fields = dataclass_fields(BenchmarkSection).values()
    return "\n".join(["fields of the section benchmark:", *(_describe("benchmark", item) for item in fields)])
