"""`hf-federated train`: train a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_federated.cli.command_parser import CommandParser
from hf_federated.cli.recipe_options import add_recipe_arguments


def add_arguments(parser: CommandParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    add_recipe_arguments(parser)
    parser.further_help = _recipe_help


def train(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the recipe cannot be run.
    """
    from hf_federated.experiments.recipe import load_recipe
    from hf_federated.experiments.train_recipe import train_recipe

    train_recipe(load_recipe(arguments.recipe, arguments.overrides), arguments.output_dir)


def _recipe_help() -> str:
    from hf_federated.cli.field_help import recipe_help

    return recipe_help()
