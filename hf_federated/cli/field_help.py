"""The help of recipe fields, printed by `hf-federated train --help SECTION` and the other commands with a recipe."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Mapping
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
    "benchmark": "the runs that hf-federated benchmark executes",
    "": "at the top level",
}
# Names of `--help SECTION` in addition to the sections: the fields at the top level, and all fields.
OTHER = "other"
ALL = "all"


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


def sections_help(prog: str) -> str:
    """The names of the sections of a recipe, and how to print their fields."""
    names = ", ".join(section_names())
    lines = textwrap.wrap(names, 76, initial_indent="  ", subsequent_indent="  ")
    lines += [f"  {prog} --help training        # the fields of a section"]
    lines += [f"  {prog} --help training.steps  # the fields of a section with this word in their names"]
    return (
        "\n".join(["sections of a recipe (`all` prints all fields; each field can be set with --set):", *lines]) + "\n"
    )


def section_names() -> list[str]:
    """The names that `--help SECTION` accepts. The fields at the top level are the section `other`."""
    return [*(name or OTHER for name in section_fields()), *named_section_fields(), "benchmark", ALL]


def section_help(name: str) -> str:
    """
    The fields of a section of a recipe with types and defaults, as printed by `--help SECTION`.

    Args:
        name (`str`): The section, `"other"` or `"all"`. A word after a dot selects the fields whose names contain it.

    Raises:
        ValueError: If there is no such section, or no field contains the word.
    """
    section, _, word = name.partition(".")
    if section not in section_names():
        similar = difflib.get_close_matches(section, section_names(), n=1)
        hint = f"did you mean {similar[0]}? Sections are" if similar else "sections are"
        raise ValueError(f"--help {name}: a recipe has no section {section!r}; {hint} {', '.join(section_names())}.")
    if section == ALL:
        return f"{recipe_help()}\n"
    classes = named_section_fields().get(section)
    if classes is not None:
        titles = {f"with {section}.name: {key}": fields for key, fields in classes.items()}
        texts = [_text_of(section, title, word, fields) for title, fields in titles.items()]
        head = [f"  {section}: {INTRODUCTIONS[section]}\n    {section}.name: {' | '.join(classes)}"]
    else:
        of_benchmark = section == "benchmark"
        key = "" if section == OTHER else section
        fields = dataclass_fields(BenchmarkSection) if of_benchmark else section_fields()[key]
        texts, head = [_text_of(key, "", word, fields)], []
    if not any(texts):
        raise ValueError(f"--help {name}: no field of the section {section} has {word!r} in its name.")
    return "\n\n".join([*head, *filter(None, texts)]) + "\n"


def _text_of(section: str, title: str, word: str, fields: Mapping[str, RecipeField]) -> str:
    """The fields whose names contain a word, below a title. Empty without such a field."""
    described = [_describe(section, item) for item in fields.values() if word in item.name]
    head = f"    {title}" if title else f"  {section or 'other fields'}: {INTRODUCTIONS[section]}"
    return "\n".join([head, *described]) if described else ""


def recipe_help() -> str:
    """The sections and fields of a recipe with types and defaults, as printed by `--help all`."""
    names = [name for name in section_names() if name not in (ALL, "benchmark")]
    return "\n\n".join(
        ["fields of a recipe (each can be set with --set):", *(section_help(name).rstrip() for name in names)]
    )
