"""The tables of a report as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import pytest

from hf_federated.cli.main import main
from hf_federated.experiments.benchmark.reports.formats import convert


REPORT = """# Title

| run        |   score |
| ---------- | ------: |
| A_1, "b" % | 1.0 ± 2 |
| x \\| y     |       - |

Text with | a bar.

| claim |
| ----- |
| A > B |
"""


def test_csv_has_the_cells_of_each_table():
    tables = [list(csv.reader(io.StringIO(table))) for table in convert(REPORT, "csv").split("\n\n")]
    assert tables == [[["run", "score"], ['A_1, "b" %', "1.0 ± 2"], ["x | y", "-"]], [["claim"], ["A > B"]]]


def test_latex_escapes_the_cells():
    first, second = convert(REPORT, "latex").split("\n\n")
    assert r'A\_1, "b" \% & 1.0 $\pm$ 2 \\' in first and r"\begin{tabular}{lr}" in first
    assert r"A \textgreater{} B \\" in second and second.endswith(r"\end{tabular}")


@pytest.mark.parametrize(("name", "suffix"), [("csv", "csv"), ("latex", "tex")])
def test_command_writes_the_tables_of_a_shipped_report(name, suffix, tmp_path):
    recipes = Path(__file__).parents[4] / "recipes" / "fednlp"
    shutil.copytree(recipes / "results" / "figure7_models", tmp_path / "figure7_models")
    command = ["benchmark", str(recipes / "figure7_models.yaml"), "--report", "--output-dir", str(tmp_path)]
    assert main([*command, "--format", name]) == 0
    written = (tmp_path / "figure7_models" / f"report.{suffix}").read_text(encoding="utf-8")
    report = (tmp_path / "figure7_models" / "report.md").read_text(encoding="utf-8")
    assert written == convert(report, name)
    assert "0.1720" in written and "large" in written
