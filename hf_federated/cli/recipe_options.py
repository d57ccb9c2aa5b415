"""Arguments that the commands for recipes share."""

from __future__ import annotations

import argparse


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, `--set` and `--output-dir`."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file of the recipe")
    add_set_option(parser)
    parser.add_argument(
        "--output-dir", metavar="DIR", help="output folder (default: training.output_dir of the recipe)"
    )


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, which changes a field of a recipe and can be repeated."""
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="set a field to a YAML value, for example training.learning_rate=5e-4; can be repeated",
    )
