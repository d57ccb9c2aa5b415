"""`hf-federated export-nvflare`: write a recipe as a job of NVIDIA FLARE."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_federated.cli.recipe_options import (
    add_existing_run_options,
    add_recipe_arguments,
    make_current_folder_importable,
)


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    add_recipe_arguments(parser)
    parser.add_argument("--output", metavar="DIR", required=True, help="folder of the job; it must not exist")
    parser.add_argument(
        "--client",
        metavar="ID",
        dest="clients",
        action="append",
        default=[],
        help="id of a client, which is the name of its NVFlare site; repeat the option for each client (default:"
        " network.clients of the recipe)",
    )
    parser.add_argument(
        "--examples",
        metavar="PATH",
        help="file, folder or Hub id with the examples of a client at its site; {client} is replaced by the id of the"
        " client (default: its part of the recipe's dataset)",
    )
    parser.add_argument(
        "--test-examples",
        metavar="PATH",
        help="file, folder or Hub id with the test examples at the server (default: data.test_path of the recipe)",
    )
    parser.add_argument(
        "--num-to-start",
        type=int,
        metavar="N",
        help="number of clients with which NVFlare starts and continues the job (default: network.num_to_start of the"
        " recipe, or else all clients)",
    )
    add_existing_run_options(
        parser,
        resume="the server continues the run in its output folder from the last checkpoint",
        overwrite="the server replaces the run in its output folder",
    )


def export_nvflare(arguments: argparse.Namespace) -> None:
    """
    Execute the command `export-nvflare`.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If NVFlare is not installed, or the recipe cannot be a job.
    """
    make_current_folder_importable()
    from hf_federated.experiments.network import nvflare_job

    # The other options have the names of the arguments.
    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "recipe")}
    folder = nvflare_job.export_nvflare(arguments.recipe, **options)
    print(f"The job is in {folder}. Submit it with: nvflare job submit -j {folder}")
