"""`benchmarks/network.py`: many clients, and the latency of a round. `benchmarks/network_flower.py`: no Flower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def measure(directory: Path, *arguments: str) -> dict[str, Any]:
    """Run the script, whose clients are in further processes, and return its numbers."""
    path = directory / "numbers.json"
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "network.py"), *arguments, "--output", str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=True,
        timeout=300,
    )
    return json.loads(path.read_text())


def test_latency_costs_at_most_two_round_trips_a_round(tmp_path):
    """A request and its reply need one round trip."""
    latency = measure(tmp_path, "latency", "--rounds", "10", "--delay", "0.05")["latency"]
    assert 0.9 <= latency["round_trips"] <= 2, latency


def test_rounds_with_threads_and_processes_are_measured(tmp_path):
    scale = measure(tmp_path, "scale", "--scale-clients", "2", "4", "--real-clients", "2", "--rounds", "2")["scale"]
    assert [each["clients"] for each in scale["threads"]["rounds"]] == [2, 4]
    assert [each["clients"] for each in scale["processes"]["rounds"]] == [2]
    assert all(each["seconds"] > 0 for kind in scale.values() for each in kind["rounds"])
    assert scale["threads"]["seconds"]["r_squared"] == pytest.approx(1)


def test_flower_benchmark_names_the_missing_installation(tmp_path):
    venv.create(tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    script = ROOT / "benchmarks" / "network_flower.py"
    finished = subprocess.run(
        [sys.executable, str(script), "--flower-python", str(python), "--output", str(tmp_path / "numbers.json")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 1
    assert 'pip install "flwr==1.41.*"' in finished.stderr
    assert not (tmp_path / "numbers.json").exists()
