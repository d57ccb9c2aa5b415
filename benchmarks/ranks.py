"""Measure the speedup of distributing clients over ranks, and the bytes that the ranks reduce.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --ranks 1 2 4 --clients 64 --output ranks.json
    python benchmarks/ranks.py --models tiny --eval-examples 512

Every rank has one PyTorch thread, so a rank represents a GPU. Runs with different numbers of ranks take turns in
separate processes. The first round of each run is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine import HERE, MINILM, TINY, print_table
from process_tree import run_watched


# `accelerate launch` needs these options on a machine without GPUs. On GPUs `--num_processes N` is enough.
LAUNCH = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


def run(folder: Path, workload: dict[str, Any], num_ranks: int, num_eval_examples: int) -> dict[str, Any]:
    """Run one federation over `num_ranks` ranks and return the seconds of its rounds and a rank's reduced bytes."""
    spec_path, result_path = folder / "spec.json", folder / "result.json"
    result_path.unlink(missing_ok=True)
    spec = {"workload": workload, "threads": 1, "federation": {"parallelism": "clients"}}
    spec["num_eval_examples"] = num_eval_examples
    spec_path.write_text(json.dumps(spec))
    script = [str(HERE / "measure.py"), "federation", str(spec_path), str(result_path)]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(num_ranks), *LAUNCH]
    command = [*launcher, "--multi_gpu", *script] if num_ranks > 1 else [sys.executable, *script]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
    }
    run_watched(command, env, folder / "output.txt", result_path, watch=False)
    return json.loads(result_path.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)")
    parser.add_argument("--clients", type=int, default=32, help="equal clients, all in every round (default: 32)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds, including one warm-up round (default: 4)")
    parser.add_argument("--repeats", type=int, default=2, help="runs for each number of ranks (default: 2)")
    parser.add_argument("--eval-examples", type=int, default=0, help="evaluation examples a round (default: 0)")
    parser.add_argument("--models", nargs="+", choices=["tiny", "minilm"], default=["tiny", "minilm"])
    parser.add_argument("--output", type=Path, help="write the numbers as JSON")
    options = parser.parse_args()
    sizes = {"tiny": TINY, "minilm": {**MINILM, "local_steps": 2, "sequence_length": 32}}
    results = []
    with tempfile.TemporaryDirectory() as name:
        for model in options.models:
            workload = {**sizes[model], "num_clients": options.clients, "num_rounds": options.rounds}
            runs: dict[int, list[dict[str, Any]]] = {num_ranks: [] for num_ranks in options.ranks}
            for _ in range(options.repeats):
                for num_ranks in runs:
                    print(f"  {model}: {num_ranks} ranks ...", file=sys.stderr)
                    runs[num_ranks].append(run(Path(name), workload, num_ranks, options.eval_examples))
            baseline = None
            for num_ranks, repeats in runs.items():
                seconds = statistics.median(second for repeat in repeats for second in repeat["rounds"])
                baseline = baseline or seconds
                results.append(
                    {
                        "model": model,
                        "workload": workload,
                        "ranks": num_ranks,
                        "num_eval_examples": options.eval_examples,
                        "round_seconds": seconds,
                        "speedup": baseline / seconds,
                        "bytes_reduced_per_round": repeats[0]["bytes_reduced"] / options.rounds,
                        "payload_bytes": repeats[0]["payload_bytes"],
                    }
                )
    print_table(
        f"{options.clients} equal clients over ranks with one thread each, {options.eval_examples} evaluation "
        "examples a round (medians)",
        ["model", "ranks", "s/round", "throughput", "MB reduced per round and rank", "payload MB"],
        [
            [
                entry["model"],
                entry["ranks"],
                f"{entry['round_seconds']:.3f}",
                f"{entry['speedup']:.2f} x",
                f"{entry['bytes_reduced_per_round'] / 1e6:.2f}",
                f"{entry['payload_bytes'] / 1e6:.2f}",
            ]
            for entry in results
        ],
    )
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
