"""Measure the log of a run, its page and the commands `watch` and `compare`.

    python benchmarks/run_files.py                       # all measurements
    python benchmarks/run_files.py cost --clients 500    # the share of a round that the log and the page take

- `open`: seconds of CPU of `hf-federated watch --once`, and bytes of the page, for 500 clients and 100 rounds.
- `cost`: share of the time of a federated run that the log of the run and its page take. Rounds train tiny models, so
  they are as short as possible.
- `compare`: seconds of CPU of `hf-federated compare` with ten runs of 100 rounds.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hf_federated.reporting.run_log import (
    CLIENTS_NAME,
    LOG_NAME,
    ClientEntry,
    RoundEntry,
    RunEnd,
    RunStart,
    dump_clients,
    to_line,
)
from hf_federated.utils.journal import Journal


ROOT = Path(__file__).resolve().parents[1]
NUM_COMPARED = 10


def write_run(folder: Path, num_clients: int, num_rounds: int, seed: int = 0) -> None:
    """Write the files of a run with five logged values a round."""
    folder.mkdir(parents=True)
    names = [f"hospital-{number:03d}" for number in range(num_clients)]
    federation = {"aggregation": "fedavg", "aggregation_kwargs": {"seed": seed}}
    lines: list[Any] = [RunStart(0.0, num_rounds, num_clients, "FedAvg", federation=federation)]
    for number in range(1, num_rounds + 1):
        logs = {"loss": 1 / number, "eval_loss": 2 / number, "eval_accuracy": 1 - 1 / number - seed / 100}
        logs |= {"learning_rate": 1e-4, "grad_norm": 1.0}
        failed = {names[number % num_clients]: "no reply within 30 s"}
        totals = 3_000_000 * num_clients * number, 3_000_000 * num_clients * number
        lines.append(RoundEntry(number, 40.0 * number, 40.0, True, logs, num_clients - 1, failed, 1, *totals))
    lines.append(RunEnd(40.0 * num_rounds, "complete"))
    Journal(folder / LOG_NAME).replace(map(to_line, lines))
    client = ClientEntry("done", 1.0, None, 0.5, num_rounds, 0, 3_000_000 * num_rounds, 3_000_000 * num_rounds)
    (folder / CLIENTS_NAME).write_bytes(dump_clients(num_rounds, 1.0, dict.fromkeys(names, client)))


def cpu_seconds(*arguments: str) -> float:
    """Seconds of CPU of a command, the smallest of three runs."""
    found = []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "hf_federated.cli.main", *arguments]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def measure_open(folder: Path, num_clients: int, num_rounds: int) -> None:
    """Print the seconds of `watch` and the sizes of its files."""
    write_run(folder / "run", num_clients, num_rounds)
    page = folder / "page.html"
    seconds = cpu_seconds("watch", str(folder / "run"), "--once", "--output", str(page))
    sizes = {
        path.name: path.stat().st_size for path in (page, folder / "run" / LOG_NAME, folder / "run" / CLIENTS_NAME)
    }
    shown = ", ".join(f"{name} {size / 1000:.0f} kB" for name, size in sizes.items())
    print(f"open: {num_clients} clients, {num_rounds} rounds: {seconds:.2f} s of CPU; {shown}")


def measure_compare(folder: Path, num_rounds: int) -> None:
    """Print the seconds of `compare`."""
    runs = [folder / f"run-{number}" for number in range(NUM_COMPARED)]
    for number, run in enumerate(runs):
        write_run(run, 20, num_rounds, seed=number)
    seconds = cpu_seconds("compare", *map(str, runs), "--output", str(folder / "comparison.html"))
    print(f"compare: {NUM_COMPARED} runs of {num_rounds} rounds: {seconds:.2f} s of CPU")


def measure_cost(folder: Path, num_clients: int, num_rounds: int) -> None:
    """Print the share of a run of tiny models that the log and the page take."""
    from hf_federated import FederatedConfig, FederatedTrainer, LiveReport
    from hf_federated.testing.tiny import tiny_arguments, tiny_dataset, tiny_model
    from hf_federated.trainer.run_recorder import RunRecorder

    spent = dict.fromkeys(("log", "page"), 0.0)
    for name, cls in (("log", RunRecorder), ("page", LiveReport)):
        for event in [each for each in vars(cls) if each.startswith("on_")]:
            setattr(cls, event, _timed(getattr(cls, event), spent, name))
    examples = tiny_dataset(4)
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=tiny_arguments(folder / "cost", disable_tqdm=True),
        train_dataset={f"hospital-{number:03d}": examples for number in range(num_clients)},
        federation=FederatedConfig(num_rounds=num_rounds, live_report=True),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    shares = ", ".join(f"{name} {100 * value / seconds:.2f} %" for name, value in spent.items())
    print(f"cost: {num_clients} clients, {num_rounds} rounds of {seconds / num_rounds:.2f} s: {shares}")


def _timed(function: Any, spent: dict[str, float], name: str) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - began

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the log of a run, its page, `watch` and `compare`.")
    parser.add_argument("measurements", nargs="*", metavar="NAME", help="open, cost, compare (default: all)")
    parser.add_argument("--clients", type=int, default=500, help="number of clients (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of open and compare (default: %(default)s)")
    parser.add_argument("--trained-rounds", type=int, default=4, help="rounds of cost (default: %(default)s)")
    options = parser.parse_args()
    names = options.measurements or ["open", "compare", "cost"]
    if unknown := set(names) - {"open", "compare", "cost"}:
        parser.error(f"unknown measurements {sorted(unknown)}; use open, cost, compare")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "open" in names:
            measure_open(folder, options.clients, options.rounds)
        if "compare" in names:
            measure_compare(folder, options.rounds)
        if "cost" in names:
            measure_cost(folder, options.clients, options.trained_rounds)


if __name__ == "__main__":
    main()
