"""`hf-federated train`: train a recipe."""

from __future__ import annotations

import argparse
import contextlib
import gc
import shlex
import sys
from collections.abc import Sequence

from hf_federated.cli.command_parser import CommandParser
from hf_federated.cli.recipe_options import (
    INTERRUPTED,
    add_existing_run_options,
    add_recipe_arguments,
    make_current_folder_importable,
)
from hf_federated.experiments.recipe.early_checks import check_early, output_folder
from hf_federated.experiments.recipe.fields import check_names
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.utils.storage import storage_errors


def add_arguments(parser: CommandParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    add_recipe_arguments(parser)
    add_existing_run_options(
        parser, resume="continue the run in the output folder from its last checkpoint; the recipe must be the same"
    )


def train(arguments: argparse.Namespace) -> int:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Returns:
        `int`: The exit code: `0`, or `130` if the user interrupted the run.

    Raises:
        CommandError: If the recipe cannot be run, or the output folder contains a run and neither option is set.
    """
    folder = None
    with contextlib.suppress(KeyboardInterrupt):
        values = read_values(arguments.recipe, arguments.overrides)
        check_names(values)
        path = output_folder(values, arguments.output_dir)
        check_early(values, path)
        # These imports take seconds. Mistakes that need no model are reported before them.
        from hf_federated.experiments.library_messages import without_idle_messages
        from hf_federated.experiments.recipe.recipe import parse_recipe
        from hf_federated.experiments.run_folder import RunFolder
        from hf_federated.experiments.train_recipe import train_recipe

        make_current_folder_importable()
        recipe = parse_recipe(values)
        folder = RunFolder(path, values, arguments.resume, arguments.overwrite)
        with storage_errors(path), without_idle_messages():
            train_recipe(recipe, path, folder=folder)
        return 0
    # The progress bar prints its last state when the trainer is deleted. The message must be the last line.
    gc.collect()
    text = "interrupted before the training started." if folder is None else folder.interruption(_command(arguments))
    print(f"\nhf-federated: {text}", file=sys.stderr)
    return INTERRUPTED


def _command(arguments: argparse.Namespace) -> str:
    """The command line of a run without `--resume` and `--overwrite`."""
    words = ["hf-federated", "train", arguments.recipe]
    words += [word for override in arguments.overrides for word in ("--set", override)]
    words += [] if arguments.output_dir is None else ["--output-dir", arguments.output_dir]
    return shlex.join(words)
