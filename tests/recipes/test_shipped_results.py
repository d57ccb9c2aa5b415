"""The committed reports are those of the committed records and recipes, without data or models."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hf_federated.cli.main import main
from hf_federated.experiments.benchmark.reports import files


FOLDER = Path(__file__).parents[2] / "recipes"
RESULTS = sorted(path.parent for path in FOLDER.glob("*/results/*/runs.jsonl"))
# One seed of a recipe with data or sizes that were set on the command line. Their reports are not made again.
WITHOUT_RECIPE = {"strategies_boolq", "strategies_copa", "strategies_rte", "strategies_wsc", "summaries_untrained"}
# Planned runs without a record.
MISSING = {"compressed_wire": 2, "finetuned_clients": 4, "summaries": 3}


def recipe_of(results: Path) -> Path:
    return results.parents[1] / f"{results.name}.yaml"


def test_every_folder_of_results_belongs_to_a_recipe():
    assert len(RESULTS) > 30
    assert {results.name for results in RESULTS if not recipe_of(results).exists()} == WITHOUT_RECIPE


@pytest.mark.parametrize(
    "results",
    [pytest.param(results, id=results.name) for results in RESULTS if results.name not in WITHOUT_RECIPE],
)
def test_report_is_that_of_the_records(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "_plot_curves", lambda panels, path, echo: bool(panels))
    monkeypatch.chdir(FOLDER.parent)  # a recipe names classes of the folder recipes
    shutil.copytree(results, tmp_path / results.name)
    (tmp_path / results.name / "report.md").unlink()
    assert main(["benchmark", str(recipe_of(results)), "--report", "--output-dir", str(tmp_path)]) == 0
    made = (tmp_path / results.name / "report.md").read_text(encoding="utf-8")
    assert made == (results / "report.md").read_text(encoding="utf-8")
    heading = capsys.readouterr().out.splitlines()[0]
    planned, finished = map(int, re.search(r"(\d+) runs, (\d+) already finished", heading).groups())
    assert planned - finished == MISSING.get(results.name, 0), heading
