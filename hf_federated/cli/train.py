"""`hf-federated train`: train a recipe."""

from __future__ import annotations

import argparse

from hf_federated.experiments.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("recipe", metavar="RECIPE", help="the YAML file")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change a field, for example training.learning_rate=5e-4; the value is YAML; may be repeated",
    )
    parser.add_argument("--output-dir", metavar="DIR", help="instead of the recipe's training.output_dir")


def train(arguments: argparse.Namespace) -> None:
    """
    Carries the command out.

    Raises:
        CommandError: If the recipe cannot be run.
    """
    # Training takes a second to import; a mistake in the recipe should not wait for it.
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from hf_federated.experiments.train_recipe import train_recipe

    train_recipe(recipe, arguments.output_dir)
