"""Arguments that the commands for recipes share."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any


# The exit code of a shell for a process that ended by Ctrl-C: 128 + SIGINT.
INTERRUPTED = 130


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the recipe, `--set` and `--output-dir`."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file of the recipe")
    add_set_option(parser)
    parser.add_argument(
        "--output-dir", metavar="DIR", help="output folder (default: training.output_dir of the recipe)"
    )


def add_output_dir(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the required option `--output-dir`, and its deprecated name `--output`."""
    parser.add_argument("--output-dir", "--output", action=_OutputDir, metavar="DIR", required=True, help=text)


class _OutputDir(argparse.Action):
    """Stores the folder. The deprecated name of the option prints a note."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if option_string == "--output":
            print(
                "hf-federated: `--output` is deprecated and will be removed in version 0.3. Use `--output-dir`.",
                file=sys.stderr,
            )
        setattr(namespace, self.dest, values)


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


def add_existing_run_options(
    parser: argparse.ArgumentParser,
    resume: str,
    overwrite: str = "delete the run in the output folder (its checkpoints, model and results) before training",
) -> None:
    """Add `--resume` and `--overwrite` with these help texts. A command line can have one of the two."""
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help=resume)
    existing.add_argument("--overwrite", action="store_true", help=overwrite)


def make_current_folder_importable() -> None:
    """
    Add the current folder to the import path, as `python -m` does.

    A recipe can then name a class of a module in the current folder, such as `aggregation: my_module:MyAverage`.
    """
    # Python 3.11 and later do not add the folder in the safe path mode (`python -P`, PYTHONSAFEPATH).
    folder = os.getcwd()
    if not getattr(sys.flags, "safe_path", False) and folder not in sys.path:
        sys.path.insert(0, folder)
