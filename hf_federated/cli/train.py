"""`hf-federated train`: train a recipe."""

from __future__ import annotations

import argparse

from hf_federated.experiments.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file of the recipe")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="set a field to a YAML value, for example training.learning_rate=5e-4; can be repeated",
    )
    parser.add_argument(
        "--output-dir", metavar="DIR", help="output folder (default: training.output_dir of the recipe)"
    )


def train(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the recipe cannot be run.
    """
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    # The import takes a second. It is delayed, so that errors in the recipe are reported quickly.
    from hf_federated.experiments.train_recipe import train_recipe

    train_recipe(recipe, arguments.output_dir)
