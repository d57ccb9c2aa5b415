"""Test of `draw_partitions.py` of the FedDRS recipes, which plots the clients of each α."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "feddrs" / "draw_partitions.py")


def test_script_plots_one_panel_for_each_alpha(superglue_dir, tmp_path, monkeypatch, capsys):
    settings = [f"data.path={superglue_dir}", "partition.num_clients=3", "public=null"]
    given = [part for setting in settings for part in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--output", str(tmp_path / "out" / "cut.png"), *given])
    runpy.run_path(SCRIPT, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["α → 0", "α = 0.05", "α = 0.5"]
    assert all(": 3 clients of " in line for line in lines)
    assert (tmp_path / "out" / "cut.png").read_bytes().startswith(b"\x89PNG")
