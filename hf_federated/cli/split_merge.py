"""`hf-federated split-merge`: the ordinary whole model, or adapter, from what a split model's parties saved."""

from __future__ import annotations

import argparse

from hf_federated.experiments.errors import command_errors
from hf_federated.split import merge_parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("folders", metavar="DIR", nargs="+", help="what a party saved; together all parts")
    parser.add_argument("--output-dir", required=True, help="where the whole model or adapter is written")


def split_merge(arguments: argparse.Namespace) -> None:
    """
    Carries the command out.

    Raises:
        CommandError: If the folders do not hold the parts of one cut of one model.
    """
    with command_errors(arguments.output_dir):
        merge_parts(arguments.folders, arguments.output_dir)
    print(f"Written to {arguments.output_dir}.")
