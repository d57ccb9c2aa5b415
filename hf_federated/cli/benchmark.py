"""`hf-federated benchmark`: run the grids of recipes and report them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_federated.experiments.benchmark import DEFAULT_DIR, BenchmarkOptions, run_benchmark
from hf_federated.experiments.grid import PlannedRun
from hf_federated.experiments.recipe import check_recipe, partitioner_has_seed
from hf_federated.experiments.recipe_yaml import read_values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("recipes", metavar="RECIPE", nargs="+", help="YAML files with a section benchmark")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change a field of all recipes, for example federation.num_rounds=5; the value is YAML; may be repeated",
    )
    parser.add_argument(
        "--seeds", metavar="SEED", nargs="+", type=int, help="these seeds instead of the recipe's benchmark.seeds"
    )
    parser.add_argument("--only", metavar="RUN", nargs="+", help="make only the runs of these names")
    parser.add_argument(
        "--output-dir", metavar="DIR", help=f"gets a folder for each recipe (default: {DEFAULT_DIR.as_posix()})"
    )
    parser.add_argument(
        "--reuse",
        metavar="DIR",
        nargs="+",
        default=[],
        help="folders of other recipes, with runs.jsonl: a run of theirs that has the same settings and the same seed "
        "under any name is taken and not made again",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--report", action="store_true", help="report the runs that are done, and run nothing")
    instead.add_argument("--dry-run", action="store_true", help="list the runs and which are done, and run nothing")


def benchmark_options(arguments: argparse.Namespace) -> BenchmarkOptions:
    """Convert the parsed arguments of [`add_arguments`] to options of a benchmark."""
    return BenchmarkOptions(
        recipes=arguments.recipes,
        overrides=arguments.overrides,
        seeds=arguments.seeds,
        only=arguments.only,
        output_dir=arguments.output_dir,
        reuse=arguments.reuse,
        report=arguments.report,
        dry_run=arguments.dry_run,
    )


def benchmark(arguments: argparse.Namespace) -> int:
    """Carries the command out; returns the exit code."""

    def execute(planned: PlannedRun, folder: Path) -> dict[str, Any]:
        from hf_federated.experiments.execution import (
            measure,  # takes a second, which reports and mistakes need not wait for
        )

        # A folder for each recipe that the run ever had: what is found in it is of this one.
        return measure(planned.values, planned.method, folder / planned.digest[:12])

    return run_benchmark(benchmark_options(arguments), read_values, check_recipe, execute, partitioner_has_seed)
