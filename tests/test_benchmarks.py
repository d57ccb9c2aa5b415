"""Smoke tests of the scripts in `benchmarks/` with tiny models: they run and write their numbers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = ["--hidden-size", "16", "--repetitions", "1", "--length", "8"]


@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        (
            "split.py",
            ["--num-heads", "2", "--num-blocks", "3", "--vocabulary", "50", "--num-clients", "2"],
            {"medians", "seconds", "bytes", "formula"},
        ),
        ("distillation.py", ["--num-clients", "2", "--num-batches", "1"], {"ratio", "seconds"}),
    ],
)
def test_benchmark_runs_and_writes_its_numbers(name, options, keys, tmp_path, monkeypatch):
    path = tmp_path / "numbers.json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, *TINY, *options, "--output", str(path)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    numbers = json.loads(path.read_text())
    assert keys <= numbers.keys()
    for values in numbers["seconds"].values():
        assert len(values) == 2 and min(values) > 0
    if name == "split.py":
        # Hidden states and gradients in float32, up and down, for one example of 8 tokens with hidden size 16.
        assert numbers["formula"] == 4 * 8 * 16 * 4 < numbers["bytes"]


@pytest.mark.slow
def test_measurement_of_overhead_times_each_round_after_the_first(tmp_path):
    spec, result = tmp_path / "spec.json", tmp_path / "result.json"
    spec.write_text(json.dumps({"workload": {"model": "tiny", "num_clients": 2, "num_rounds": 3}, "threads": 1}))
    command = [sys.executable, str(BENCHMARKS / "measure.py"), "overhead", str(spec), str(result)]
    subprocess.run(command, check=True, timeout=300)
    rounds = json.loads(result.read_text())["rounds"]
    assert len(rounds) == 2
    assert all(seconds > 0 for entry in rounds for seconds in entry.values())


@pytest.mark.slow
def test_measurement_of_run_files_prints_each_measurement():
    command = [
        sys.executable,
        BENCHMARKS / "run_files.py",
        "--clients",
        "20",
        "--rounds",
        "5",
        "--trained-rounds",
        "2",
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    measured = [
        line for line in lines if line.startswith(("open: 20 clients", "compare: 10 runs", "cost: 20 clients"))
    ]
    assert len(measured) == 3


@pytest.mark.slow
def test_measurement_of_data_checks_finds_all_planted_faults(tmp_path):
    output = tmp_path / "checks.json"
    command = [sys.executable, str(BENCHMARKS / "data_checks.py"), "--rows", "20000", "--output", str(output)]
    subprocess.run(command, check=True, timeout=300)
    results = json.loads(output.read_text())
    assert [item["case"] for item in results] == ["clean", "faults", "ids", "parquet"]
    assert not any(item["torch"] for item in results)
