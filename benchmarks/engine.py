"""Measure the cost of federated training: time over a bare PyTorch loop, memory, Flower's simulation, adapter swaps.

    python benchmarks/engine.py                          # all measurements
    python benchmarks/engine.py overhead --threads 1 --pfl-python pfl/bin/python
    python benchmarks/engine.py scale --threads 1        # 10 to 100 000 registered clients
    python benchmarks/engine.py --quick --output out.json

Every measurement runs in separate processes. `README.md` in this folder describes each measurement. `flower` needs the
`benchmark` extra, or `--flower-python` with an interpreter that has it. The side of pfl-research needs an environment:

    python -m venv pfl && pfl/bin/pip install "pfl==0.6.*" torch transformers datasets peft
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from process_tree import run_watched
from turns import Side, median_ratio, take_turns


HERE = Path(__file__).resolve().parent
ALGORITHMS = ("fedavg", "fedprox", "fedopt")
TINY = {"model": "tiny", "local_steps": 4, "batch_size": 8, "sequence_length": 16}
MINILM = {"model": "minilm", "local_steps": 4, "batch_size": 8, "sequence_length": 64}
MEMORY = {"model": "memory", "local_steps": 1, "batch_size": 1, "sequence_length": 8}
SCALE = {"model": "mlp", "local_steps": 1, "batch_size": 8}
# The settings of the two sides of the library in `overhead`.
LOCAL_LOOPS = {"library": {"local_loop": "auto"}, "library, Trainer's loop": {"local_loop": "trainer"}}
# Workload, clients and rounds of each size of `overhead`.
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {
    "mlp": ({"model": "mlp"}, 10, 21),
    "tiny": (TINY, 10, 11),
    "lora": ({"model": "lora", "sequence_length": 32}, 10, 9),
    "minilm": (MINILM, 3, 6),
}


class Bench:
    """
    Run measurements in fresh processes and return their results.

    Args:
        options (`argparse.Namespace`): Options of the command line.
        folder (`pathlib.Path`): Folder for specifications, results and inputs that the compared sides share.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self._num_runs = 0
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": str(options.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # The scripts also run from a checkout that is not installed.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        }

    def run(self, name: str, workload: dict[str, Any], watch: bool = False, **spec: Any) -> dict[str, Any]:
        """
        Run one measurement in a fresh process.

        Args:
            name (`str`): `"flower"`, or a name of `measure.MEASUREMENTS`.
            workload (`dict`): Fields of a `Workload`.
            watch (`bool`): Whether to sample the memory of the process and all its children.
            spec (`Any`): Additional settings of the measurement.

        Raises:
            RuntimeError: If the process failed. The message contains the end of its output.
        """
        self._num_runs += 1
        result_path = self.folder / f"result-{self._num_runs}.json"
        spec_path = self.folder / f"spec-{self._num_runs}.json"
        spec |= {"workload": workload, "threads": self.options.threads, "result": str(result_path)}
        spec_path.write_text(json.dumps(spec))
        if name == "flower":
            command = [self.options.flower_python, str(HERE / "flower_simulation.py"), str(spec_path)]
        else:
            command = [sys.executable, str(HERE / "measure.py"), name, str(spec_path), str(result_path)]
        print(f"  {name}: {workload['num_clients']} clients, {workload['num_rounds']} rounds ...", file=sys.stderr)
        memory = run_watched(command, self.env, self.folder / "output.txt", result_path, watch)
        return {**json.loads(result_path.read_text()), **({"memory": memory} if watch else {})}

    def start_side(self, name: str, workload: dict[str, Any], **spec: Any) -> Side:
        """Start the process of a side: `"pfl"`, or a side of `measure.take_turns`."""
        self._num_runs += 1
        spec_path = self.folder / f"spec-{self._num_runs}.json"
        spec_path.write_text(json.dumps({**spec, "side": name, "workload": workload, "threads": self.options.threads}))
        if name == "pfl":
            command = [self.options.pfl_python, str(HERE / "pfl_side.py"), str(spec_path)]
        else:
            command = [sys.executable, str(HERE / "measure.py"), "turns", str(spec_path), os.devnull]
        return Side(command, self.env, self.folder / f"output-{self._num_runs}.txt")

    def overhead(self) -> dict[str, Any]:
        """(a) Measure the CPU time of rounds over the bare loop: the library, the plain Trainer and pfl-research."""
        entries = []
        for size in self.options.sizes:
            workload, num_clients, num_rounds = SIZES[size]
            if workload["model"] == "minilm":
                workload = {**workload, "model": self.options.model}
            num_rounds = self.options.rounds or (3 if self.options.quick else num_rounds)
            workload = {**workload, "num_clients": num_clients, "num_rounds": num_rounds}
            print(f"  {size}: {num_clients} clients, {num_rounds} rounds of each side ...", file=sys.stderr)
            sides = {"bare": self.start_side("bare", workload)}
            for name, federation in LOCAL_LOOPS.items():
                sides[name] = self.start_side("library", workload, federation=federation)
            sides["plain Trainer"] = self.start_side("plain", workload)
            if self.options.pfl_python:
                sides["pfl"] = self.start_side("pfl", workload)
            seconds = take_turns(sides, num_rounds)
            entries.append(
                {
                    "size": size,
                    "workload": workload,
                    "seconds": seconds,
                    "ratios": {name: median_ratio(seconds[name], seconds["bare"]) for name in sides},
                }
            )
        names = list(entries[0]["ratios"])
        print_table(
            "(a) CPU seconds of a round over those of the bare loop (all sides take turns; median and range)",
            ["size", "clients", "rounds", "bare ms/client", *names[1:]],
            [
                [
                    entry["size"],
                    entry["workload"]["num_clients"],
                    len(entry["seconds"]["bare"]),
                    f"{1000 * _median(entry['seconds']['bare']) / entry['workload']['num_clients']:.1f}",
                    *("{:.3f} ({:.2f}-{:.2f})".format(*entry["ratios"][name]) for name in names[1:]),
                ]
                for entry in entries
            ],
        )
        return {"cases": entries}

    def scale(self) -> dict[str, Any]:
        """(b) Measure the CPU time of a client in a round, by number of registered clients."""
        num_rounds = self.options.rounds or (3 if self.options.quick else 9)
        cohorts = {count: min(count, self.options.cohort) for count in self.options.registered}
        sides = {}
        for count, cohort in cohorts.items():
            print(f"  {count} registered clients, {cohort} in a round, {num_rounds} rounds ...", file=sys.stderr)
            workload = {**SCALE, "num_clients": count, "num_rounds": num_rounds}
            sides[str(count)] = self.start_side("library", workload, federation={"clients_per_round": cohort})
        seconds = take_turns(sides, num_rounds)
        entries = [
            {
                "registered": count,
                "cohort": cohort,
                "preparation_seconds": sides[str(count)].preparation_seconds,
                "client_ms": [1000 * second / cohort for second in seconds[str(count)]],
            }
            for count, cohort in cohorts.items()
        ]
        for entry in entries:
            entry["ratio"] = median_ratio(entry["client_ms"], entries[0]["client_ms"])
        print_table(
            "(b) CPU time of a client in a round by number of registered clients (all sides take turns)",
            ["registered", "in a round", "preparation s", "ms/client", "ratio to the first"],
            [
                [
                    entry["registered"],
                    entry["cohort"],
                    f"{entry['preparation_seconds']:.1f}",
                    f"{_median(entry['client_ms']):.2f}",
                    "{:.2f} ({:.2f}-{:.2f})".format(*entry["ratio"]),
                ]
                for entry in entries
            ],
        )
        return {"cases": entries}

    def memory(self) -> dict[str, Any]:
        """(c) Measure the peak memory of a run, by number of clients."""
        counts = self.options.memory_clients or ((2, 16) if self.options.quick else (2, 16, 64, 256))
        entries = []
        cases: dict[str, dict[str, str]] = {name: {"aggregation": name} for name in ALGORITHMS}
        for name, federation in (cases | {"bfloat16": {"exchange_dtype": "bfloat16"}}).items():
            peaks: dict[str, dict[str, float]] = {}
            for num_clients in counts:
                workload = {**MEMORY, "num_clients": num_clients, "num_rounds": 2}
                peaks[str(num_clients)] = self.run("memory", workload, federation=federation)
            first, last = (peaks[str(count)]["peak_mb"] for count in (counts[0], counts[-1]))
            entries.append({"aggregation": name, "peaks": peaks, "growth": last / first - 1})
        model_mb = entries[0]["peaks"][str(counts[0])]["model_mb"]
        print_table(
            f"(c) peak resident memory in MB (anonymous part), a model of {model_mb:.0f} MB, 2 rounds",
            ["aggregation", *(f"{count} clients" for count in counts), "growth"],
            [
                [
                    entry["aggregation"],
                    *(f"{p['peak_mb']:.0f} ({p['peak_anonymous_mb']:.0f})" for p in entry["peaks"].values()),
                    f"{100 * entry['growth']:+.1f} %",
                ]
                for entry in entries
            ],
        )
        return {"cases": entries}

    def flower(self) -> dict[str, Any]:
        """(d) Run the same federation with the library and on Flower's simulation engine."""
        quick = self.options.quick
        entries = []
        for workload, num_rounds in ((TINY, 6), ({**MINILM, "model": self.options.model}, 4)):
            workload = {**workload, "num_clients": 10, "num_rounds": 3 if quick else num_rounds}
            shared = self.run("prepare", workload, folder=str(self.folder / "shared"))
            workload["model"] = shared["model"]
            paths = {"model": shared["model"], "rows": shared["rows"]}
            runs: dict[str, list[dict[str, Any]]] = {"bare": [], "federation": [], "flower": []}
            for _ in range(1 if quick else 3):
                for side in runs:
                    extra = {**paths, "output_dir": str(self.folder / "flower")}
                    runs[side].append(self.run(side, workload, watch=True, **(extra if side == "flower" else {})))
            entries.append(_compare_with_flower(workload, shared["name"], runs))
        print_table(
            "(d) the same federation on Flower's simulation engine, one worker with the same number of threads",
            ["model", "side", "s/round", "overhead ms/client", "ratio", "PSS MB", "USS MB", "less Ray's own", "ratio"],
            [row for entry in entries for row in _flower_rows(entry)],
        )
        return {"cases": entries}

    def adapter(self) -> dict[str, Any]:
        """(e) Measure the time to swap in an adapter."""
        workload = {**MINILM, "model": self.options.model, "num_clients": 1, "num_rounds": 1}
        result = self.run("adapter", workload, num_repeats=50 if self.options.quick else 300)
        print_table(
            f"(e) swapping in a LoRA adapter of {result['num_tensors']} tensors, {result['num_values']} values",
            ["Exchange.write", "peft.set_peft_model_state_dict"],
            [[f"{result['write_ms']:.2f} ms", f"{result['set_peft_model_state_dict_ms']:.2f} ms"]],
        )
        return result


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _compare_with_flower(workload: dict[str, Any], name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"model": name, "workload": {**workload, "model": name}}
    seconds = {side: _median(s for run in repeats for s in run["rounds"]) for side, repeats in runs.items()}
    for side, repeats in runs.items():
        overhead = (seconds[side] - seconds["bare"]) / workload["num_clients"]
        peaks = {key: _median(run["memory"][key] for run in repeats) for key in repeats[0]["memory"]}
        entry[side] = {"round_seconds": seconds[side], "overhead_ms_per_client": 1000 * overhead, **peaks}
    entry["flower"]["first_round_seconds"] = _median(run["first_round"] for run in runs["flower"])
    library, flower = entry["federation"], entry["flower"]
    entry["overhead_ratio"] = library["overhead_ms_per_client"] / flower["overhead_ms_per_client"]
    entry["memory_ratio"] = library["peak_pss_mb"] / flower["peak_pss_mb"]
    entry["memory_ratio_without_ray"] = library["peak_pss_mb"] / flower["peak_pss_without_ray_mb"]
    return entry


def _flower_rows(entry: dict[str, Any]) -> list[list[Any]]:
    rows = []
    for side, label in (("bare", "bare loop"), ("federation", "hf_federated"), ("flower", "Flower")):
        values = entry[side]
        rows.append(
            [
                entry["model"],
                label,
                f"{values['round_seconds']:.3f}",
                f"{values['overhead_ms_per_client']:.1f}",
                f"{entry['overhead_ratio']:.2f}" if side == "federation" else "",
                f"{values['peak_pss_mb']:.0f}",
                f"{values['peak_uss_mb']:.0f}",
                f"{values['peak_pss_without_ray_mb']:.0f}",
                f"{entry['memory_ratio']:.2f}" if side == "federation" else "",
            ]
        )
    return rows


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a title and a table with aligned columns."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    print(f"\n{title}")
    for row in (cells[0], ["-" * width for width in widths], *cells[1:]):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    sys.stdout.flush()


def _check_flower(python: str) -> None:
    probe = "import importlib.util as u, sys; sys.exit(not (u.find_spec('flwr') and u.find_spec('ray')))"
    if subprocess.run([python, "-c", probe]).returncode:
        sys.exit(
            f"engine.py: {python} has no Flower with Ray. Install the `benchmark` extra, set --flower-python to an "
            "interpreter with Flower, or run the other measurements without `flower`."
        )


def main() -> None:
    names = ("overhead", "scale", "memory", "flower", "adapter")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="*", metavar="|".join(names), help="default: all")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    parser.add_argument("--threads", type=int, default=2, help="number of PyTorch threads on every side (default: 2)")
    parser.add_argument("--model", default="minilm", help="folder of a pretrained MiniLM (default: random weights)")
    parser.add_argument("--flower-python", default=sys.executable, help="interpreter that has flwr[simulation]")
    parser.add_argument("--pfl-python", help="interpreter that has pfl, for `overhead` (default: no side of pfl)")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="models of `overhead`")
    parser.add_argument("--rounds", type=int, help="rounds of `overhead` and `scale`, the first one is not counted")
    parser.add_argument("--registered", type=int, nargs="+", default=[10, 1000, 100_000], help="clients of `scale`")
    parser.add_argument("--cohort", type=int, default=100, help="clients in a round of `scale`")
    parser.add_argument("--memory-clients", type=int, nargs="+", help="numbers of clients of `memory`")
    parser.add_argument("--quick", action="store_true", help="fewer clients, rounds and repeats")
    options = parser.parse_args()
    if unknown := set(options.measurements) - set(names):
        parser.error(f"unknown measurement {', '.join(sorted(unknown))}. The measurements are {', '.join(names)}.")
    selected = [name for name in names if not options.measurements or name in options.measurements]
    if "flower" in selected:
        _check_flower(options.flower_python)
    results: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "num_cpus": os.cpu_count(),
            "threads": options.threads,
            "load_average": os.getloadavg()[0],
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate", "peft")},
        }
    }
    print(", ".join(f"{name} {value}" for name, value in results["environment"].items()))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for name in selected:
            results[name] = getattr(bench, name)()
            if options.output:
                options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
