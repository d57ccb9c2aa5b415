"""Execute the runs of a benchmark one after the other, or several at a time in separate processes.

A run in a separate process is `python -m hf_federated.experiments.benchmark.jobs FOLDER`. It reads the recipe of the
run as YAML from its standard input, and writes its results, or its error, to `result.json` in the folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from hf_federated.experiments.benchmark.grid import PlannedRun
from hf_federated.experiments.errors import CommandError
from hf_federated.utils.errors import RoundFailedError


RESULT_NAME = "result.json"
# Errors that keep their class when they come from another process. Other errors become a `RunProcessError`.
_KNOWN_ERRORS = {
    error.__name__: error for error in (FloatingPointError, RoundFailedError, CommandError, ValueError, RuntimeError)
}

Execute = Callable[[PlannedRun], dict[str, Any]]


class RunProcessError(RuntimeError):
    """A run in a separate process failed, or its process was killed."""


def execute_runs(
    runs: Sequence[PlannedRun], execute: Execute, jobs: int = 1
) -> Generator[tuple[PlannedRun, dict[str, Any] | Exception, float], None, None]:
    """
    Execute runs, and return the results as the runs finish.

    Args:
        runs (`Sequence[PlannedRun]`): The runs.
        execute (`Callable`): Executes a run. With several jobs, it is called in several threads.
        jobs (`int`, *optional*, defaults to 1): Number of runs at a time.

    Returns:
        `Generator`: Each run with its results or its error, and its duration in seconds.
    """

    def timed(run: PlannedRun) -> tuple[PlannedRun, dict[str, Any] | Exception, float]:
        start = time.perf_counter()
        try:
            outcome: dict[str, Any] | Exception = execute(run)
        except Exception as error:  # the other runs continue after any error
            outcome = error
        return run, outcome, time.perf_counter() - start

    if jobs == 1:
        yield from map(timed, runs)
        return
    with ThreadPoolExecutor(jobs) as pool:
        futures: list[Future[Any]] = [pool.submit(timed, run) for run in runs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def execute_in_process(run: PlannedRun, folder: Path, jobs: int) -> dict[str, Any]:
    """
    Execute a run in a separate process.

    Each process has its share of the threads of the machine, unless `OMP_NUM_THREADS` is set.

    Args:
        run (`PlannedRun`): The run.
        folder (`pathlib.Path`): The folder of the run.
        jobs (`int`): Number of processes at a time.

    Returns:
        `dict[str, Any]`: The results of [`~hf_federated.experiments.benchmark.measured_run.measure_run`].

    Raises:
        RunProcessError: If the process was killed, or the run failed with an unexpected error, whose traceback is
            printed. Other errors keep their class.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RESULT_NAME
    path.unlink(missing_ok=True)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    process = subprocess.run(
        [sys.executable, "-m", "hf_federated.experiments.benchmark.jobs", str(folder)],
        input=yaml.safe_dump({"method": run.method, "values": run.values}, allow_unicode=True),
        env={"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        lines = process.stderr.strip().splitlines()
        raise RunProcessError(
            f"the process ended with exit code {process.returncode} and without results. Its last line is:"
            f" {lines[-1] if lines else 'empty'}"
        ) from None
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    if "error" in content:
        known = _KNOWN_ERRORS.get(content["class"])
        if known is not None:
            raise known(content["error"])
        print(content["traceback"], file=sys.stderr)
        raise RunProcessError(content["traceback"].strip().splitlines()[-1])
    results: dict[str, Any] = content["results"]
    return results


def _main(folder: Path) -> None:
    from hf_federated.experiments.benchmark.measured_run import measure_run

    run = yaml.safe_load(sys.stdin.buffer.read())
    content: dict[str, Any]
    try:
        content = {"results": measure_run(run["values"], run["method"], folder)}
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KNOWN_ERRORS]
        content = {"error": str(error), "class": next(iter(kinds), None), "traceback": traceback.format_exc()}
    (folder / RESULT_NAME).write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
