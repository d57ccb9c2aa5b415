"""The entry point `hf-federated`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from hf_federated.cli.recipe import RecipeError, RecipeField, load_recipe, sections, type_name


INTRODUCTIONS = {
    "model": "the model that every client starts from",
    "data": "the rows, whose they are, and which clients are held out to test on",
    "training": "any field of transformers.TrainingArguments; a step of the run is a round",
    "federation": "any field of hf_federated.FederatedConfig",
    "card": "any argument of Trainer.create_model_card",
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
    return "\n".join(parts)


class _TrainParser(argparse.ArgumentParser):
    """Describes a recipe's fields in its help, which takes reading them: only when help is asked for."""

    def format_help(self) -> str:
        return f"{super().format_help()}\n{recipe_help()}\n"


def build_parser() -> argparse.ArgumentParser:
    """The parser of `hf-federated` and its commands."""
    parser = argparse.ArgumentParser(
        prog="hf-federated", description="Federated learning around transformers.Trainer."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_TrainParser)
    train = commands.add_parser(
        "train",
        help="train a recipe",
        description="Train a recipe: a YAML file with the sections model, data, training, federation and card.",
    )
    train.add_argument("recipe", metavar="RECIPE", help="the YAML file")
    train.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change a field, for example training.learning_rate=5e-4; the value is YAML; may be repeated",
    )
    train.add_argument("--output-dir", metavar="DIR", help="instead of the recipe's training.output_dir")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Args:
        argv (`Sequence[str]`, *optional*): The arguments; those of the process by default.

    Returns:
        `int`: The exit code: `0`, or `2` for a recipe that cannot be run.
    """
    arguments = build_parser().parse_args(argv)
    # Training takes a second to import; a mistake in the recipe should not wait for it.
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        from hf_federated.cli.train import train

        train(recipe, arguments.output_dir)
    except RecipeError as error:
        print(f"hf-federated: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
