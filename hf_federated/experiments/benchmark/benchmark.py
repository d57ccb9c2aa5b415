"""Execute the benchmark grids of recipes, resume them after an interruption, and report the results.

[`run_benchmark`] decides which runs to execute and in which order. The functions that read, check and execute a recipe
are arguments. Each recipe has an output folder with `runs.jsonl`, `report.md` and `learning_curves.png`. Each run
writes its own files to `runs/<name>/seed-<seed>` in this folder, such as the predictions for its test examples.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_federated
from hf_federated.experiments.benchmark.comparison import main_metric
from hf_federated.experiments.benchmark.grid import PlannedRun
from hf_federated.experiments.benchmark.identity import INPUT_FIELDS
from hf_federated.experiments.benchmark.jobs import execute_runs
from hf_federated.experiments.benchmark.prediction_files import copy_predictions, relative_path
from hf_federated.experiments.benchmark.recipe_grid import RecipeGrid, prefix_errors, read_grid
from hf_federated.experiments.benchmark.reports.files import write_reports
from hf_federated.experiments.benchmark.run_log import (
    LOG_NAME,
    FinishedRuns,
    RunLog,
    find_finished,
    find_record,
    read_records,
)
from hf_federated.experiments.benchmark.selection import trial_names
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.text import plural
from hf_federated.utils.errors import RoundFailedError


DEFAULT_DIR = Path("outputs") / "benchmarks"
# Errors of a training that diverges: a loss that is not finite, or updates that the server rejects.
DIVERGED = (FloatingPointError, RoundFailedError)
# Errors that a run can raise in normal use: incompatible values, out of memory, no remaining clients, a loss that is
# not finite. For other errors the traceback is printed.
EXPECTED_ERRORS = (ValueError, RuntimeError, FloatingPointError)
# Results that a record keeps in addition to the metrics. `None` if a method does not have the result.
RESULT_FIELDS = (
    "lower_is_better",
    "num_rounds",
    "step_name",
    "num_epochs",
    "num_clients",
    "num_failed",
    "bytes_up",
    "bytes_down",
    *INPUT_FIELDS,
    "file_times",
    "test_source",
    "clients",
    "further_tests",
)


# Hashes what a planned run would read.
InputsOf = Callable[[PlannedRun], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """
    Options of a benchmark.

    Args:
        recipes (`Sequence[str]`): Paths of YAML files with a section `benchmark`.
        overrides (`Sequence[str]`, *optional*): Changes of the form `section.field=value`, applied to all recipes.
        seeds (`Sequence[int]`, *optional*): Seeds that replace `benchmark.seeds` of the recipes.
        only (`Sequence[str]`, *optional*): Names of the runs to execute. Defaults to all runs.
        output_dir (`str`, *optional*):
            Parent of the output folder of each recipe. By default, the parent is a folder in `outputs/benchmarks` with
            the name of the recipe's folder, so that two recipes of one file name have two output folders.
        reuse (`Sequence[str]`, *optional*): Output folders of other recipes whose finished runs are reused if they
            have the same settings and the same seed.
        jobs (`int`, *optional*, defaults to 1): Number of runs at a time. With several, threads call `execute`.
        format (`str`, *optional*, defaults to `"markdown"`): A further format of the tables, `"csv"` or `"latex"`.
        report (`bool`, *optional*, defaults to `False`): Report the finished runs without executing any run.
        dry_run (`bool`, *optional*, defaults to `False`): List the runs without executing any run.
    """

    recipes: Sequence[str]
    overrides: Sequence[str] = ()
    seeds: Sequence[int] | None = None
    only: Sequence[str] | None = None
    output_dir: str | None = None
    reuse: Sequence[str] = ()
    jobs: int = 1
    format: str = "markdown"
    report: bool = False
    dry_run: bool = False


def run_benchmark(
    options: BenchmarkOptions,
    read: Callable[[str, Sequence[str]], dict[str, Any]],
    check: Callable[[dict[str, Any]], object],
    execute: Callable[[PlannedRun, Path], dict[str, Any]],
    partition_has_seed: bool | Callable[[dict[str, Any]], bool] = True,
    echo: Callable[[str], None] = print,
    inputs_of: InputsOf | None = None,
) -> int:
    """
    Execute the benchmark. Finished runs are not repeated, and the other runs continue if a run fails.

    Args:
        options ([`BenchmarkOptions`]):
            The recipes, and the runs to execute.
        read (`Callable`):
            Called with the path of a recipe and the overrides. Returns the recipe as read from YAML, including the
            section `benchmark`.
        check (`Callable`):
            Called with the recipe of every run before the first run is executed. Raises a [`CommandError`] if the
            recipe cannot be run.
        execute (`Callable`):
            Called with a planned run and its folder. Returns the results of the run:

            - `metric`: name of the main metric of the task;
            - `metrics`: all metrics on the test examples;
            - `history`: metrics by round, `[{"round": 1, "accuracy": 0.5}, ...]`;
            - `step_name`: the unit of the steps in `history`, if it is not the round;
            - `scale`, `num_rounds`, `num_epochs`, `num_clients`, `num_failed` (failed updates), `bytes_up`,
              `bytes_down`, `lower_is_better`, `test_source` (number and source of the test examples), the hashes of
              `inputs_of`, `file_times` (digest of the sizes and times of the files before the run), `predictions`
              (path of the file with the predictions for the test examples, within the folder): `None` if a method
              does not have the result;
            - `seconds`: duration of the run. Defaults to the duration of the call. `None` if the duration of the whole
              run is unknown.

            The folder may be missing, or contain files of a killed run or of a run with different settings. Files of
            different settings must not be used. If `execute` raises an error, only this run fails.
        partition_has_seed (`bool` or `Callable`, *optional*, defaults to `True`):
            As in [`~hf_federated.experiments.benchmark.grid.plan_runs`].
        echo (`Callable`, *optional*):
            Prints a line.
        inputs_of (`Callable`, *optional*):
            Called with a planned run that has a record with other locations of data and models, or with files that
            have been written since. Returns the hashes of what the run would read, as in
            [`~hf_federated.experiments.benchmark.run_inputs.hash_inputs`]. The record counts if it has the same
            hashes. Reports do not call the function.

    Returns:
        `int`: The exit code: `0`, or `1` if a run failed.

    Raises:
        CommandError: If a recipe cannot be run, another benchmark writes to the folder, or a log is damaged. Also
            after the first run of a recipe whose task does not have the metric `benchmark.metric`.
    """
    grids = _read_grids(options, read, partition_has_seed)
    if options.report:
        grids = [grid.with_chosen(read_records(grid.trials.folder) if grid.trials else []) for grid in grids]
        done = [find_finished(read_records(grid.folder), grid.runs) for grid in grids]
        for grid, found in zip(grids, done, strict=True):
            echo(_heading(grid, grid.runs, found))
        write_reports(grids, done, echo, options.format)
        return 0
    for grid in grids:
        for run in [*(grid.trials.runs if grid.trials else []), *grid.runs]:
            with prefix_errors(f"{grid.path}, run {run.name!r}"):
                check(run.values)
    inputs_of = _once_per_run(inputs_of) if inputs_of else None
    if options.dry_run:
        for grid in grids:
            if grid.trials is not None:
                found = find_finished(read_records(grid.trials.folder), grid.trials.runs, inputs_of)
                _list_runs(grid.trials, found, trial_names(grid.section, options.only), echo)
                grid = grid.with_chosen(list(found.records.values()))
            _list_runs(grid, find_finished(read_records(grid.folder), grid.runs, inputs_of), options.only, echo)
        return 0
    failures = _run_grids(grids, options, execute, echo, inputs_of)
    if failures:
        echo(f"\n{plural(len(failures), 'run')} failed. Repeat the command to execute only the failed runs:")
        for failure in failures:
            echo(f"  {failure}")
    return 1 if failures else 0


def _read_grids(
    options: BenchmarkOptions,
    read: Callable[[str, Sequence[str]], dict[str, Any]],
    partition_has_seed: bool | Callable[[dict[str, Any]], bool],
) -> list[RecipeGrid]:
    grids: dict[Path, RecipeGrid] = {}
    for path in options.recipes:
        parent = Path(options.output_dir or DEFAULT_DIR / Path(path).resolve().parent.name)
        folder = parent / Path(path).stem
        if folder in grids:
            raise CommandError(
                f"{grids[folder].path} and {path} would both write to {folder}. Use a different --output-dir for each."
            )
        values = read(path, options.overrides)
        grids[folder] = read_grid(path, values, options.seeds, folder, partition_has_seed)
    known = list(dict.fromkeys(name for grid in grids.values() for name in grid.section.runs))
    for name in options.only or []:
        if name not in known:
            raise CommandError(f"--only {name!r} is not a run. The runs are {', '.join(known)}.")
    return list(grids.values())


def _run_grids(
    grids: Sequence[RecipeGrid],
    options: BenchmarkOptions,
    execute: Callable[[PlannedRun, Path], dict[str, Any]],
    echo: Callable[[str], None],
    inputs_of: InputsOf | None,
) -> list[str]:
    """Execute or reuse the runs of all grids, and report them. Return one line per failed run."""
    reusable = [Path(folder) for folder in options.reuse]
    for folder in reusable:
        if not (folder / LOG_NAME).is_file() and folder not in [grid.folder for grid in grids]:
            raise CommandError(f"--reuse {folder}: the folder contains no {LOG_NAME}.")
    failures: list[str] = []
    with ExitStack() as stack:
        # Lock all folders before the first run, because the last run can start hours later.
        logs = [stack.enter_context(RunLog(grid.folder)) for grid in grids]
        ready = []
        for grid, log in zip(grids, logs, strict=True):
            if grid.trials is not None:
                trial_log = stack.enter_context(RunLog(grid.trials.folder))
                names = trial_names(grid.section, options.only)
                failures += _run_grid(grid.trials, trial_log, names, execute, echo, reusable, inputs_of, options.jobs)
                found = find_finished(trial_log.records, grid.trials.runs, inputs_of)
                grid = grid.with_chosen(list(found.records.values()))
            ready.append(grid)
            failures += _run_grid(grid, log, options.only, execute, echo, reusable, inputs_of, options.jobs)
        done = [find_finished(log.records, grid.runs, inputs_of) for grid, log in zip(ready, logs, strict=True)]
        write_reports(ready, done, echo, options.format)
    return failures


def _once_per_run(inputs_of: InputsOf) -> InputsOf:
    """Call a function once for each run. A run whose examples cannot be loaded has inputs that no record has."""
    known: dict[str, Mapping[str, Any]] = {}

    def hash_once(run: PlannedRun) -> Mapping[str, Any]:
        if run.full_digest not in known:
            try:
                known[run.full_digest] = inputs_of(run)
            except Exception:  # the run itself reports the error
                known[run.full_digest] = {"train_rows": "unknown"}
        return known[run.full_digest]

    return hash_once


def _run_grid(
    grid: RecipeGrid,
    log: RunLog,
    only: Sequence[str] | None,
    execute: Callable[[PlannedRun, Path], dict[str, Any]],
    echo: Callable[[str], None],
    reusable: Sequence[Path],
    inputs_of: InputsOf | None,
    jobs: int,
) -> list[str]:
    """Execute or reuse the runs that are not finished. Return one line per failed run."""
    done = find_finished(log.records, grid.runs, inputs_of)
    selected = [run for run in grid.runs if only is None or run.name in only]
    pending = [run for run in selected if run.key not in done.records]
    echo(_heading(grid, selected, done))
    with prefix_errors(grid.path):
        main_metric([record for record in done.records.values() if not record.get("diverged")], grid.section)
    position = itertools.count(len(selected) - len(pending) + 1)
    to_execute = []
    for run in pending:
        reused = _find_reusable_record(run, reusable, grid.folder, inputs_of)
        if reused is None:
            to_execute.append(run)
            continue
        with command_errors(str(grid.folder)):
            log.append({**reused, "benchmark": grid.title, "recipe": grid.name, "run": run.name})
        echo(f"[{next(position)}/{len(selected)}] {run}: reused from {reused['taken_from']}")
    failures = []
    outcomes = execute_runs(
        to_execute, lambda run: execute(run, grid.folder / "runs" / run.name / f"seed-{run.seed}"), jobs
    )
    with closing(outcomes):
        for run, outcome, seconds in outcomes:
            label = f"[{next(position)}/{len(selected)}] {run}"
            if isinstance(outcome, Exception):
                failures += _handle_error(grid, log, run, outcome, seconds, label, echo)
            else:
                with command_errors(str(grid.folder)):
                    log.append(_record(grid, run, outcome, seconds))
                echo(f"{label}: {_result_line(grid, log.records[-1])}")
    return failures


def _result_line(grid: RecipeGrid, record: Mapping[str, Any]) -> str:
    with prefix_errors(grid.path):
        metric = main_metric([record], grid.section)  # raises on a missing metric, before the next run
    value = record["metrics"][metric]
    shown = "not finite" if value is None else f"{value:.3f}"
    duration = "" if record["seconds"] is None else f" ({record['seconds']:.0f} s)"
    tested_on = "" if record["test_source"] is None else f", tested on {record['test_source']}"
    return f"{metric} {shown}{duration}{tested_on}"


def _handle_error(
    grid: RecipeGrid,
    log: RunLog,
    run: PlannedRun,
    error: Exception,
    seconds: float,
    label: str,
    echo: Callable[[str], None],
) -> list[str]:
    """Record a trial that diverged. Print any other error, and return its line for the list of failed runs."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if grid.is_trial and isinstance(error, DIVERGED):
        result = {"metric": grid.section.metric or "value", "metrics": {}}
        with command_errors(str(grid.folder)):
            log.append({**_record(grid, run, result, seconds), "diverged": reason})
        echo(f"{label}: diverged: {reason}")
        return []
    if not isinstance(error, EXPECTED_ERRORS):
        reason = f"{type(error).__name__}: {reason}"
        traceback.print_exception(error)
    echo(f"{label}: failed: {reason}")
    return [f"{grid.name}: {run}: {reason}"]


def _find_reusable_record(
    run: PlannedRun, folders: Sequence[Path], target: Path, inputs_of: InputsOf | None
) -> dict[str, Any] | None:
    """
    Find a record with the settings of the run, and add the recipe and run that it originates from.

    The predictions of the record are copied to the folder `target`.
    """
    for folder in folders:
        record = find_record(read_records(folder), run, inputs_of)
        if record is not None:
            run_folder = f"runs/{run.name}/seed-{run.seed}/{run.full_digest[:12]}"
            with command_errors(str(folder)):
                copied = copy_predictions(record, folder, target, run_folder)
            origin = f"{record['recipe']}: {record['run']}"
            digests = {"digest": run.digest, "full_digest": run.full_digest}
            return {"taken_from": origin, **record, **digests, "predictions": copied}
    return None


def _record(grid: RecipeGrid, run: PlannedRun, result: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "benchmark": grid.title,
        "recipe": grid.name,
        "run": run.name,
        "seed": run.seed,
        "method": run.method,
        "digest": run.digest,
        "full_digest": run.full_digest,
        "scale": result.get("scale"),
        "metric": result["metric"],
        "value": result["metrics"].get(result["metric"]),
        "metrics": result["metrics"],
        "history": result.get("history") or [],
        **{name: result.get(name) for name in RESULT_FIELDS},
        "predictions": relative_path(result.get("predictions"), grid.folder),
        "prepared_by": grid.script,
        "seconds": result.get("seconds", seconds),
        "versions": {
            "hf_federated": hf_federated.__version__,
            **{package: importlib.metadata.version(package) for package in ("torch", "transformers")},
        },
    }


def _heading(grid: RecipeGrid, selected: Sequence[PlannedRun], done: FinishedRuns) -> str:
    num_done = sum(run.key in done.records for run in selected)
    heading = (
        f"{grid.title} ({grid.name}): {plural(len(selected), 'run')}, {num_done} already finished in {grid.folder}."
    )
    if done.stale:
        listed = "; ".join(map(str, done.stale))
        heading += f"\nNot used, because the recipe changed after these runs: {listed}."
    return heading


def _list_runs(grid: RecipeGrid, done: FinishedRuns, only: Sequence[str] | None, echo: Callable[[str], None]) -> None:
    selected = [run for run in grid.runs if only is None or run.name in only]
    echo(_heading(grid, selected, done))
    for run in selected:
        echo(f"  {'finished' if run.key in done.records else 'pending '}  {run} ({run.method})")
