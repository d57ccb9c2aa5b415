"""`hf-federated benchmark`: run the grids of recipes and report them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_federated.cli.command_parser import CommandParser
from hf_federated.cli.dataclass_options import build_from_options
from hf_federated.cli.recipe_options import INTERRUPTED, add_set_option, make_current_folder_importable


if TYPE_CHECKING:
    from hf_federated.experiments.benchmark.grid import PlannedRun


def add_arguments(parser: CommandParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("recipes", metavar="RECIPE", nargs="+", help="YAML file with a section benchmark")
    add_set_option(parser)
    parser.add_argument(
        "--seeds", metavar="SEED", nargs="+", type=int, help="seeds that replace benchmark.seeds of the recipes"
    )
    parser.add_argument("--only", metavar="RUN", nargs="+", help="names of the runs to execute (default: all)")
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        help="parent of the output folder of each recipe (default: a folder in outputs/benchmarks with the name of the"
        " recipe's folder)",
    )
    parser.add_argument(
        "--reuse",
        metavar="DIR",
        nargs="+",
        default=[],
        help="output folders of other recipes, with a runs.jsonl; finished runs with the same settings and seed are"
        " reused, also under a different name",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=1,
        help="number of runs at a time, each in its own process with its share of the CPU cores (default: 1)",
    )
    parser.add_argument(
        "--format",
        choices=("markdown", "csv", "latex"),
        default="markdown",
        help="also write the tables of the report as report.csv or report.tex (default: markdown, only report.md)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--report", action="store_true", help="report the finished runs without executing any run")
    instead.add_argument(
        "--dry-run", action="store_true", help="list the finished and pending runs without executing any run"
    )


def benchmark(arguments: argparse.Namespace) -> int:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Returns:
        `int`: The exit code: `0`, `1` if a run failed, or `130` if the user interrupted the benchmark.
    """
    try:
        from hf_federated.experiments.benchmark.benchmark import BenchmarkOptions, run_benchmark
        from hf_federated.experiments.benchmark.jobs import execute_in_process
        from hf_federated.experiments.benchmark.measured_run import measure_run
        from hf_federated.experiments.benchmark.run_inputs import hash_inputs
        from hf_federated.experiments.errors import CommandError
        from hf_federated.experiments.recipe.recipe import parse_recipe, partitioner_has_seed
        from hf_federated.experiments.recipe.yaml_file import read_values

        def execute(planned: PlannedRun, folder: Path) -> dict[str, Any]:
            # The digest in the path separates the files of runs with different settings, data or models.
            folder = folder / planned.full_digest[:12]
            if options.jobs > 1:
                return execute_in_process(planned, folder, options.jobs)
            return measure_run(planned.values, planned.method, folder)

        make_current_folder_importable()
        if arguments.jobs < 1:
            raise CommandError(f"--jobs is {arguments.jobs}; it must be at least 1.")
        options = build_from_options(BenchmarkOptions, arguments)
        return run_benchmark(
            options,
            read_values,
            parse_recipe,
            execute,
            partitioner_has_seed,
            inputs_of=lambda planned: hash_inputs(planned.values),
        )
    except KeyboardInterrupt:
        print(
            "\nhf-federated: interrupted. Finished runs are kept. Repeat the command to continue; a run with "
            "checkpoints continues from its last checkpoint.",
            file=sys.stderr,
        )
        return INTERRUPTED
