"""The means and standard deviations in the tables of the papers' READMEs are those of the records."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest


RECIPES = Path(__file__).parents[2] / "recipes"
# A mean without a sign: a difference has one.
CELL = re.compile(r"(?<![+\-−\d.])(\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)")


def measured(folder: str) -> list[tuple[float, float]]:
    """Mean and standard deviation over seeds of each metric of each run of a paper."""
    values = defaultdict(dict)
    for log in (RECIPES / folder / "results").glob("*/runs.jsonl"):
        for record in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
            sources = {None: record["metrics"], **(record.get("further_tests") or {}), **(record.get("clients") or {})}
            for source, metrics in sources.items():
                for name, value in metrics.items():
                    if isinstance(value, (int, float)):
                        values[log, record["run"], source, name][record["seed"]] = value
    by_seed = [list(each.values()) for each in values.values() if len(each) > 1]
    return [(statistics.mean(each), statistics.stdev(each)) for each in by_seed]


@pytest.mark.parametrize("folder", ["fednlp", "fedid", "adafd", "feddrs", "fl_glm"])
def test_numbers_are_those_of_the_records(folder):
    known = measured(folder)
    lines = (RECIPES / folder / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [match for line in lines if line.startswith("|") for match in CELL.finditer(line)]
    assert len(cells) > 20
    for cell in cells:
        halves = [0.5 * 10.0 ** -len(number.partition(".")[2]) * 1.01 for number in cell.groups()]
        mean, deviation = map(float, cell.groups())
        is_known = any(abs(m - mean) <= halves[0] and abs(s - deviation) <= halves[1] for m, s in known)
        assert is_known, cell.group()
