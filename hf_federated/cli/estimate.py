"""`hf-federated estimate`: memory, bytes and time of a recipe, before it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from hf_federated.cli.dataclass_options import build_from_options
from hf_federated.cli.recipe_options import add_set_option, make_current_folder_importable
from hf_federated.experiments.errors import command_errors
from hf_federated.experiments.recipe.fields import check_names
from hf_federated.experiments.recipe.yaml_file import read_values


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file of the recipe")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    speed = parser.add_argument_group("speed of devices and connections (default: no time is computed)")
    speed.add_argument(
        "--bandwidth-mbit", type=float, metavar="N", help="bandwidth of each client in each direction, in 10^6 bit/s"
    )
    speed.add_argument("--latency-ms", type=float, metavar="N", help="delay of a message in each direction")
    speed.add_argument(
        "--tflops", type=float, metavar="N", help="10^12 floating point operations per second of a client's device"
    )
    speed.add_argument(
        "--server-tflops", type=float, metavar="N", help="the same of the server's device (default: --tflops)"
    )
    sizes = parser.add_argument_group("numbers in place of those of the data")
    sizes.add_argument("--num-clients", type=int, metavar="N", help="number of clients")
    sizes.add_argument("--num-examples", type=int, metavar="N", help="number of training examples of each client")
    sizes.add_argument("--num-public", type=int, metavar="N", help="number of public examples")
    sizes.add_argument("--num-labels", type=int, metavar="N", help="number of labels of the task")
    sizes.add_argument(
        "--sequence-length", type=int, metavar="N", help="tokens of an example (default: the maximum of the task)"
    )


def estimate(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the recipe is invalid, a config cannot be read, or a number is missing.
    """
    values = read_values(arguments.recipe, arguments.overrides)
    check_names(values)
    # These imports take seconds. A misspelled field is reported before them.
    from hf_federated.experiments.estimate.recipe_estimate import estimate_recipe
    from hf_federated.experiments.estimate.results import describe
    from hf_federated.experiments.estimate.sizes import EstimateOptions
    from hf_federated.experiments.recipe.recipe import parse_recipe

    make_current_folder_importable()
    with command_errors("estimate"):
        options = build_from_options(EstimateOptions, arguments)
    result = estimate_recipe(parse_recipe(values), options)
    print(json.dumps(result.to_dict(options), indent=2) if arguments.json else "\n".join(describe(result, options)))
