"""`hf-federated benchmark`: the grids of recipes, run once a name and seed, resumed, and reported.

What a run is made of comes from outside ([`benchmark`] takes functions that read, check and execute a recipe); here is
which runs are made, in which order, and what is left of them: `runs.jsonl`, `report.md` and `learning_curves.png` in
a folder for each recipe, and what a run writes itself in `runs/<name>/seed-<seed>` below it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_federated
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.grid import BenchmarkSection, PlannedRun, plan, read_section
from hf_federated.experiments.report import benchmark_report, curve_panel, main_metric
from hf_federated.experiments.run_log import LOG_NAME, Finished, RunLog, finished, read_records
from hf_federated.reporting.learning_curves import CurvePanel, plot_learning_curves


DEFAULT_DIR = Path("outputs") / "benchmarks"
REPORT_NAME = "report.md"
CURVES_NAME = "learning_curves.png"
# What a run may come to: values that do not fit, no memory, no clients left, no finite loss. Of others one wants to
# know where they are from.
EXPECTED_ERRORS = (ValueError, RuntimeError, FloatingPointError)
# What a record keeps of a run beside its metrics; `None` for what a method has not.
RESULT_FIELDS = (
    "lower_is_better",
    "num_rounds",
    "step_name",
    "num_epochs",
    "num_clients",
    "num_failed",
    "bytes_up",
    "bytes_down",
    "train_rows",
    "test_rows",
    "further_rows",
    "clients",
    "further_tests",
)


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """
    Which recipes to run, and how.

    Args:
        recipes (`Sequence[str]`): Paths of YAML files with a section `benchmark`.
        overrides (`Sequence[str]`, *optional*): `section.field=value` each, applied to all recipes.
        seeds (`Sequence[int]`, *optional*): Seeds that replace the recipe's `benchmark.seeds`.
        only (`Sequence[str]`, *optional*): Names of the runs to execute. Defaults to all runs.
        output_dir (`str`, *optional*): Parent of the folders of the recipes. Defaults to `outputs/benchmarks`.
        reuse (`Sequence[str]`, *optional*): Folders of other recipes whose finished runs are reused.
        report (`bool`, *optional*, defaults to `False`): Report the finished runs and execute none.
        dry_run (`bool`, *optional*, defaults to `False`): List the runs and execute none.
    """

    recipes: Sequence[str]
    overrides: Sequence[str] = ()
    seeds: Sequence[int] | None = None
    only: Sequence[str] | None = None
    output_dir: str | None = None
    reuse: Sequence[str] = ()
    report: bool = False
    dry_run: bool = False


def run_benchmark(
    options: BenchmarkOptions,
    read: Callable[[str, Sequence[str]], dict[str, Any]],
    check: Callable[[dict[str, Any]], None],
    execute: Callable[[PlannedRun, Path], dict[str, Any]],
    partition_has_seed: bool | Callable[[dict[str, Any]], bool] = True,
    echo: Callable[[str], None] = print,
) -> int:
    """
    Carries the command out. Runs that are done are not made again; a run that fails does not keep the others back.

    Args:
        options ([`BenchmarkOptions`]):
            The recipes and how to run them.
        read (`Callable`):
            Path of a recipe and overrides to the recipe as read from YAML, `benchmark` included.
        check (`Callable`):
            Refuses a recipe that cannot be run with a [`CommandError`]. Called for every run of every recipe before
            the first is made.
        execute (`Callable`):
            A planned run and its folder to what it measured: `metric` (name of the task's main metric), `metrics` (all
            of them on the test rows), `history` (`[{"round": 1, "accuracy": 0.5}, ...]`), `scale`, `num_rounds`,
            `step_name` (what these rounds are, if not rounds), `num_epochs`, `num_clients`, `num_failed` (updates),
            `bytes_up`, `bytes_down`, `lower_is_better`, `train_rows` and `test_rows` (hashes of the rows), `None` for
            what a method has not; `seconds`, by default those of the call, `None` if they are not those of the whole
            run. The folder need not exist, or may hold what a killed run or one of other settings has left; nothing
            of the latter may be used. What it raises fails the run and no other.
        partition_has_seed (`bool` or `Callable`, *optional*, defaults to `True`):
            As in [`~hf_federated.experiments.grid.plan`].
        echo (`Callable`, *optional*):
            Prints a line.

    Returns:
        `int`: The exit code: `0`, or `1` if a run failed.

    Raises:
        CommandError: If a recipe cannot be run, another benchmark writes to the folder, or a log is damaged; also
            after the first run of a recipe whose `benchmark.metric` the task does not have.
    """
    grids = _read_grids(options, read, partition_has_seed)
    if options.report:
        done = [finished(read_records(grid.folder), grid.runs) for grid in grids]
        for grid, found in zip(grids, done, strict=True):
            echo(_heading(grid, grid.runs, found))
        _finish(grids, done, echo)
        return 0
    for grid in grids:
        for run in grid.runs:
            with _named(f"{grid.path}, run {run.name!r}"):
                check(run.values)
    if options.dry_run:
        for grid in grids:
            _list_runs(grid, finished(read_records(grid.folder), grid.runs), options.only, echo)
        return 0
    reusable = [Path(folder) for folder in options.reuse]
    for folder in reusable:
        if not (folder / LOG_NAME).is_file() and folder not in [grid.folder for grid in grids]:
            raise CommandError(f"--reuse {folder}: there is no {LOG_NAME}.")
    failures: list[str] = []
    with ExitStack() as stack:
        # All folders are taken before the first run, which may be hours before the last.
        logs = [stack.enter_context(RunLog(grid.folder)) for grid in grids]
        for grid, log in zip(grids, logs, strict=True):
            failures += _run_grid(grid, log, options.only, execute, echo, reusable)
        _finish(grids, [log.finished(grid.runs) for grid, log in zip(grids, logs, strict=True)], echo)
    if failures:
        echo(f"\n{_count(len(failures), 'run')} failed; the same command makes only these again:")
        for failure in failures:
            echo(f"  {failure}")
    return 1 if failures else 0


@dataclass(frozen=True)
class _Grid:
    path: str
    folder: Path
    section: BenchmarkSection
    runs: list[PlannedRun]

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def title(self) -> str:
        return self.section.title or self.name


def _read_grids(
    options: BenchmarkOptions,
    read: Callable[[str, Sequence[str]], dict[str, Any]],
    partition_has_seed: bool | Callable[[dict[str, Any]], bool],
) -> list[_Grid]:
    grids: dict[Path, _Grid] = {}
    for path in options.recipes:
        values = read(path, options.overrides)
        with _named(path):
            section = read_section(values)
            if options.seeds:
                section = dataclasses.replace(section, seeds=list(options.seeds))
            runs = plan(values, section, partition_has_seed)
        folder = Path(options.output_dir or DEFAULT_DIR) / Path(path).stem
        if folder in grids:
            raise CommandError(
                f"{grids[folder].path} and {path} would both write to {folder}; run them with different --output-dir."
            )
        grids[folder] = _Grid(path, folder, section, runs)
    known = list(dict.fromkeys(name for grid in grids.values() for name in grid.section.runs))
    for name in options.only or []:
        if name not in known:
            raise CommandError(f"--only {name!r} is not a run. The runs are {', '.join(known)}.")
    return list(grids.values())


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Says of which recipe or run an error is."""
    try:
        yield
    except CommandError as error:
        raise CommandError(f"{where}: {error}") from error


def _run_grid(
    grid: _Grid,
    log: RunLog,
    only: Sequence[str] | None,
    execute: Callable[[PlannedRun, Path], dict[str, Any]],
    echo: Callable[[str], None],
    reusable: Sequence[Path],
) -> list[str]:
    """Makes the runs that are not done, or takes them from other folders; what failed, a line each."""
    done = log.finished(grid.runs)
    selected = [run for run in grid.runs if only is None or run.name in only]
    to_do = [run for run in selected if run.key not in done.records]
    echo(_heading(grid, selected, done))
    with _named(grid.path):
        main_metric(list(done.records.values()), grid.section)
    failures = []
    for position, run in enumerate(to_do, start=len(selected) - len(to_do) + 1):
        place = f"[{position}/{len(selected)}] {run}"
        taken = _same_run(run, reusable)
        if taken is not None:
            with command_errors(str(grid.folder)):
                log.append({**taken, "benchmark": grid.title, "recipe": grid.name, "run": run.name})
            echo(f"{place}: taken from {taken['taken_from']}")
            continue
        start = time.perf_counter()
        try:
            result = execute(run, grid.folder / "runs" / run.name / f"seed-{run.seed}")
        except Exception as error:  # whatever it is, the other runs need not wait for it
            reason = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, EXPECTED_ERRORS):
                reason = f"{type(error).__name__}: {reason}"
                traceback.print_exc()
            failures.append(f"{grid.name}: {run}: {reason}")
            echo(f"{place}: failed: {reason}")
            continue
        with command_errors(str(grid.folder)):
            log.append(_record(grid, run, result, time.perf_counter() - start))
        record = log.records[-1]
        with _named(grid.path):
            metric = main_metric([record], grid.section)  # if there is no such metric, stop now and not after all runs
        value = record["metrics"][metric]
        shown = "not finite" if value is None else f"{value:.3f}"
        seconds = "" if record["seconds"] is None else f" ({record['seconds']:.0f} s)"
        echo(f"{place}: {metric} {shown}{seconds}")
    return failures


def _same_run(run: PlannedRun, folders: Sequence[Path]) -> dict[str, Any] | None:
    """The first record of the run's settings in these folders, and of which recipe and run it was first."""
    for folder in folders:
        for record in reversed(read_records(folder)):  # the last one counts
            if record["digest"] == run.digest:
                return {"taken_from": f"{record['recipe']}: {record['run']}", **record}
    return None


def _record(grid: _Grid, run: PlannedRun, result: dict[str, Any], seconds: float) -> dict[str, Any]:
    return {
        "benchmark": grid.title,
        "recipe": grid.name,
        "run": run.name,
        "seed": run.seed,
        "method": run.method,
        "digest": run.digest,
        "scale": result.get("scale"),
        "metric": result["metric"],
        "value": result["metrics"][result["metric"]],
        "metrics": result["metrics"],
        "history": result.get("history") or [],
        **{name: result.get(name) for name in RESULT_FIELDS},
        "seconds": result.get("seconds", seconds),
        "versions": {
            "hf_federated": hf_federated.__version__,
            **{package: importlib.metadata.version(package) for package in ("torch", "transformers")},
        },
    }


def _heading(grid: _Grid, selected: Sequence[PlannedRun], done: Finished) -> str:
    num_done = sum(run.key in done.records for run in selected)
    heading = f"{grid.title} ({grid.name}): {_count(len(selected), 'run')}, {num_done} found done in {grid.folder}."
    if done.stale:
        listed = "; ".join(map(str, done.stale))
        heading += f"\nMade before the recipe was changed, kept in the log, and not used: {listed}."
    return heading


def _list_runs(grid: _Grid, done: Finished, only: Sequence[str] | None, echo: Callable[[str], None]) -> None:
    selected = [run for run in grid.runs if only is None or run.name in only]
    echo(_heading(grid, selected, done))
    for run in selected:
        echo(f"  {'done ' if run.key in done.records else 'to do'}  {run} ({run.method})")


def _finish(grids: Sequence[_Grid], results: Sequence[Finished], echo: Callable[[str], None]) -> None:
    """Prints the reports and writes them; of several recipes a picture with all curves too."""
    panels = []
    for grid, done in zip(grids, results, strict=True):
        records = list(done.records.values())
        if not records:
            echo(f"Nothing to report of {grid.name}.")
            continue
        with _named(grid.path), command_errors(f"{grid.folder / LOG_NAME}: a record cannot be read"):
            report = benchmark_report(records, grid.section, grid.name)
            panel = curve_panel(records, grid.section, grid.name)
        echo(f"\n{report.rstrip()}\n")
        drawn = _draw([panel] if panel else [], grid.folder / CURVES_NAME, echo)
        picture = f"\n![Learning curves]({CURVES_NAME})\n" if drawn else ""
        with command_errors(str(grid.folder)):
            (grid.folder / REPORT_NAME).write_text(report + picture, encoding="utf-8")
        echo(f"{f'{REPORT_NAME} and {CURVES_NAME} are' if drawn else f'{REPORT_NAME} is'} in {grid.folder}.")
        panels += [panel] if panel else []
    if len(panels) > 1:
        path = grids[0].folder.parent / CURVES_NAME
        if _draw(panels, path, echo):
            echo(f"The learning curves of all {len(panels)} recipes are in {path}.")


def _draw(panels: Sequence[CurvePanel], path: Path, echo: Callable[[str], None]) -> bool:
    """Whether the picture could be drawn; if not, the reason is printed."""
    if not panels:
        echo(f"No {path.name}: no federated run has logged a round.")
        return False
    try:
        plot_learning_curves(panels, path)
    except (ImportError, ValueError, OSError) as error:
        echo(f"No {path.name}: {error}")
        return False
    return True


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
