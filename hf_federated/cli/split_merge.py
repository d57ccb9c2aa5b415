"""`hf-federated split-merge`: merge the saved parts of a split model into the full model or adapter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_federated.experiments.errors import command_errors


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("folders", metavar="DIR", nargs="+", help="folders with the saved parts of all parties")
    parser.add_argument("--output-dir", required=True, help="folder for the full model or adapter")


def split_merge(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the folders do not contain the parts of one cut of one model.
    """
    from hf_federated.split import merge_parts

    with command_errors(arguments.output_dir):
        merge_parts(arguments.folders, arguments.output_dir)
    print(f"Saved the model to {arguments.output_dir}.")
