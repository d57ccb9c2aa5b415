"""`hf-federated train`: train a recipe."""

from __future__ import annotations

import argparse

from hf_federated.cli.recipe_options import add_recipe_arguments
from hf_federated.experiments.recipe import load_recipe
from hf_federated.experiments.train_recipe import train_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    add_recipe_arguments(parser)


def train(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the recipe cannot be run.
    """
    train_recipe(load_recipe(arguments.recipe, arguments.overrides), arguments.output_dir)
