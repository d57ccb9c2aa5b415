"""Measure the cost of federated training: time over a bare PyTorch loop, memory, Flower's simulation, adapter swaps.

    python benchmarks/engine.py                          # all measurements
    python benchmarks/engine.py overhead adapter         # two measurements
    python benchmarks/engine.py --quick --output out.json

Every measurement runs in separate processes. `README.md` in this folder describes each measurement. `flower` needs the
`benchmark` extra, or `--flower-python` with an interpreter that has it.
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


HERE = Path(__file__).resolve().parent
ALGORITHMS = ("fedavg", "fedprox", "fedopt")
TINY = {"model": "tiny", "local_steps": 4, "batch_size": 8, "sequence_length": 16}
MINILM = {"model": "minilm", "local_steps": 4, "batch_size": 8, "sequence_length": 64}
MEMORY = {"model": "memory", "local_steps": 1, "batch_size": 1, "sequence_length": 8}


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

    def overhead(self) -> dict[str, Any]:
        """(a) Measure the time of rounds and clients over the bare loop and over the plain Trainer's steps."""
        quick = self.options.quick
        cases = [("tiny", TINY, clients, rounds) for clients, rounds in ((10, 9), (100, 4), (1000, 3))]
        if quick:
            cases = [("tiny", TINY, 10, 4), ("tiny", TINY, 100, 2)]
        cases.append(("minilm", {**MINILM, "model": self.options.model}, 10, 2 if quick else 4))
        entries = []
        plain_ratios: dict[str, float] = {}
        for size, workload, num_clients, num_rounds in cases:
            workload = {**workload, "num_clients": num_clients, "num_rounds": num_rounds}
            if size not in plain_ratios:
                pairs = self.run("plain", workload)["clients"]
                plain_ratios[size] = _median(pair["ours"] / pair["bare"] for pair in pairs)
            result = self.run("overhead", workload)
            rounds, pairs = result["rounds"], result["clients"]
            ratio = _median(entry["ours"] / entry["bare"] for entry in rounds)
            entries.append(
                {
                    "workload": workload,
                    "num_timed_rounds": len(rounds),
                    "round_seconds": _median(entry["ours"] for entry in rounds),
                    "bare_round_seconds": _median(entry["bare"] for entry in rounds),
                    "ratio_to_bare": ratio,
                    "ratio_range": [f(entry["ours"] / entry["bare"] for entry in rounds) for f in (min, max)],
                    "plain_trainer_ratio_to_bare": plain_ratios[size],
                    "ratio_to_plain_trainer": ratio / plain_ratios[size],
                    "client_ms": 1000 * _median(pair["ours"] for pair in pairs),
                    "bare_client_ms": 1000 * _median(pair["bare"] for pair in pairs),
                    "client_ms_over_bare": 1000 * _median(pair["ours"] - pair["bare"] for pair in pairs),
                    "train_call_ms_over_bare": 1000 * _median(pair["plain"] - pair["bare"] for pair in pairs),
                    "client_ratio": _median(pair["ours"] / pair["bare"] for pair in pairs),
                }
            )
        print_table(
            "(a) time over a bare PyTorch loop (all sides alternate client by client; medians)",
            [
                *("model", "clients", "rounds", "s/round", "bare", "x bare", "x plain Trainer"),
                *("ms/client", "bare", "over bare", "train() over bare"),
            ],
            [
                [
                    Path(e["workload"]["model"]).name,
                    e["workload"]["num_clients"],
                    e["num_timed_rounds"],
                    f"{e['round_seconds']:.3f}",
                    f"{e['bare_round_seconds']:.3f}",
                    f"{e['ratio_to_bare']:.2f} ({e['ratio_range'][0]:.2f}-{e['ratio_range'][1]:.2f})",
                    f"{e['ratio_to_plain_trainer']:.2f}",
                    f"{e['client_ms']:.1f}",
                    f"{e['bare_client_ms']:.1f}",
                    f"{e['client_ms_over_bare']:.1f}",
                    f"{e['train_call_ms_over_bare']:.1f}",
                ]
                for e in entries
            ],
        )
        return {"cases": entries}

    def memory(self) -> dict[str, Any]:
        """(b) Measure the peak memory of a run, by number of clients."""
        counts = (2, 16) if self.options.quick else (2, 16, 64, 256)
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
            f"(b) peak resident memory in MB (anonymous part), a model of {model_mb:.0f} MB, 2 rounds",
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
        """(c) Run the same federation with the library and on Flower's simulation engine."""
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
            "(c) the same federation on Flower's simulation engine, one worker with the same number of threads",
            ["model", "side", "s/round", "overhead ms/client", "ratio", "PSS MB", "USS MB", "less Ray's own", "ratio"],
            [row for entry in entries for row in _flower_rows(entry)],
        )
        return {"cases": entries}

    def adapter(self) -> dict[str, Any]:
        """(d) Measure the time to swap in an adapter."""
        workload = {**MINILM, "model": self.options.model, "num_clients": 1, "num_rounds": 1}
        result = self.run("adapter", workload, num_repeats=50 if self.options.quick else 300)
        print_table(
            f"(d) swapping in a LoRA adapter of {result['num_tensors']} tensors, {result['num_values']} values",
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
    names = ("overhead", "memory", "flower", "adapter")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="*", metavar="|".join(names), help="default: all")
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    parser.add_argument("--threads", type=int, default=2, help="number of PyTorch threads on every side (default: 2)")
    parser.add_argument("--model", default="minilm", help="folder of a pretrained MiniLM (default: random weights)")
    parser.add_argument("--flower-python", default=sys.executable, help="interpreter that has flwr[simulation]")
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
