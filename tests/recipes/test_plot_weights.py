"""Tests of `plot_weights.py` of the AdaFD recipes, which plots client weights from the records of a benchmark."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "adafd" / "plot_weights.py")


@pytest.fixture
def plot(tmp_path, monkeypatch):
    def run(*records):
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        monkeypatch.setattr(sys, "argv", [SCRIPT, str(tmp_path)])
        runpy.run_path(SCRIPT, run_name="__main__")
        return tmp_path / "weights.png"

    return run


def record(run, seed, *rounds):
    history = [
        {"round": number, "accuracy": 0.5, **{f"weight/{name}": value for name, value in weights.items()}}
        for number, weights in enumerate(rounds, start=1)
    ]
    return {"run": run, "seed": seed, "digest": "0", "metric": "accuracy", "history": history}


def test_weights_are_means_over_seeds(plot, capsys):
    picture = plot(
        record("β = 1", 0, {"north": 0.0, "south": 1.0}),  # superseded by the next record
        record("β = 1", 0, {"north": 0.5, "south": 0.5}, {"north": 0.2, "south": 0.8}),
        record("β = 1", 1, {"north": 0.7, "south": 0.3}, {"south": 1.0}),
        record("β = 5", 0, {"north": 0.9, "south": 0.1}),
        record("DS-FL", 0, {}),
    )
    assert capsys.readouterr().out.splitlines() == [
        "| run | round | north | south |",
        "|:---|---:|---:|---:|",
        "| β = 1 | 1 | 0.600 | 0.400 |",
        "| β = 1 | 2 | 0.100 | 0.900 |",
        "| β = 5 | 1 | 0.900 | 0.100 |",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_panels_share_the_client_order_and_average_only_seeds_that_have_the_round(plot, capsys):
    plot(
        record("A", 0, {"north": 0.25, "south": 0.75}),
        record("A", 1, {"south": 0.5, "north": 0.5}, {"north": 0.5, "south": 0.5}),
        record("B", 0, {"west": 0.5, "south": 0.25, "north": 0.25}),
    )
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| A | 1 | 0.375 | 0.625 | 0.000 |",
        "| A | 2 | 0.500 | 0.500 | 0.000 |",
        "| B | 1 | 0.250 | 0.250 | 0.500 |",
    ]


def test_records_without_client_weights_raise(plot):
    with pytest.raises(SystemExit, match="No run in .* has client weights"):
        plot(record("DS-FL", 0, {}))
