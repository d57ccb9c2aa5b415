"""Tests of `sample_quality.py` of the FedDRS recipes, which measures pseudo-samples during their optimization."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "feddrs" / "sample_quality.py")


def test_script_writes_one_curve_for_each_adversary_and_seed(model_dir, superglue_dir, tmp_path, monkeypatch, capsys):
    settings = [
        f"model.name_or_path={model_dir}",
        f"data.path={superglue_dir}",
        "task.max_length=16",
        "training.use_cpu=true",
        "federation.num_rounds=1",
        "federation.local_epochs=1",
        "partition.num_clients=3",
    ]
    given = [part for setting in settings for part in ("--set", setting)]
    sizes = ["--num-steps", "4", "--num-samples", "4", "--sample-length", "4", "--step-size", "5"]
    output = ["--output-dir", str(tmp_path), "--seeds", "0", "1"]
    monkeypatch.setattr(sys, "argv", [SCRIPT, *output, *sizes, *given])
    names = list(runpy.run_path(SCRIPT, run_name="__main__")["ADVERSARIES"])
    printed = capsys.readouterr().out
    curves = json.loads((tmp_path / "quality.json").read_text())["curves"]
    assert list(curves) == names and all(name in printed for name in names)
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    values = {name: np.array(curve) for name, curve in curves.items()}
    assert {curve.shape for curve in values.values()} == {(2, 5, 2)}
    # All adversaries use the same starts. Without an adversary, the client's model fits the pseudo-label better.
    assert all(np.array_equal(curve[:, 0], values["none"][:, 0]) for curve in values.values())
    assert (values["none"][:, -1, 0] < values["none"][:, 0, 0]).all()


def test_adversary_increases_the_servers_loss():
    descent = runpy.run_path(SCRIPT)["descent"]
    torch.manual_seed(0)
    weights = torch.randn(2, 6, 3)
    teacher, student = (lambda samples, labels, weight=weight: samples.mean(1) @ weight for weight in weights)
    start, labels = torch.randn(8, 4, 6), torch.randint(3, (8,))
    ends = [descent(start, labels, teacher, student, (weight, "ce"), 20, 0.5)[-1] for weight in (0.0, 0.5)]
    assert ends[1][1] > ends[0][1]
    assert ends[0][0] == pytest.approx(float(descent(start, labels, teacher, student, (0.0, "kl"), 20, 0.5)[-1][0]))
