"""The files of a benchmark's report: `report.md` and `learning_curves.png` in the output folder of each recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_federated.experiments.benchmark.prediction_files import examples_of
from hf_federated.experiments.benchmark.recipe_grid import RecipeGrid, prefix_errors
from hf_federated.experiments.benchmark.reports.formats import SUFFIXES, convert
from hf_federated.experiments.benchmark.reports.report import benchmark_report, curve_panel
from hf_federated.experiments.benchmark.run_log import LOG_NAME, FinishedRuns
from hf_federated.experiments.errors import command_errors
from hf_federated.reporting.learning_curves import CurvePanel, plot_learning_curves


REPORT_NAME = "report.md"
CURVES_NAME = "learning_curves.png"


def write_reports(
    grids: Sequence[RecipeGrid],
    results: Sequence[FinishedRuns],
    echo: Callable[[str], None],
    format: str = "markdown",
) -> None:
    """
    Print and write the reports. For several recipes, also plot all learning curves in one figure.

    Args:
        grids (`Sequence[RecipeGrid]`): The grids, in the order of the recipes.
        results (`Sequence[FinishedRuns]`): The finished runs of each grid.
        echo (`Callable`): Prints a line.
        format (`str`, *optional*, defaults to `"markdown"`): A further format of the tables, `"csv"` or `"latex"`.

    Raises:
        CommandError: If a record is incomplete, or a file cannot be written.
    """
    panels = []
    for grid, done in zip(grids, results, strict=True):
        records = list(done.records.values())
        if not records:
            echo(f"No finished runs of {grid.name} to report.")
            continue
        with prefix_errors(grid.path), command_errors(f"{grid.folder / LOG_NAME}: a record is incomplete"):
            report = benchmark_report(records, grid.section, grid.name, examples_of(records, grid.folder))
            report = "\n\n".join([report.rstrip(), *grid.selection]) + "\n"
            panel = curve_panel(records, grid.section, grid.name)
        echo(f"\n{report.rstrip()}\n")
        plotted = _plot_curves([panel] if panel else [], grid.folder / CURVES_NAME, echo)
        figure = f"\n![Learning curves]({CURVES_NAME})\n" if plotted else ""
        with command_errors(str(grid.folder)):
            (grid.folder / REPORT_NAME).write_text(report + figure, encoding="utf-8")
            if format != "markdown":
                path = (grid.folder / REPORT_NAME).with_suffix(SUFFIXES[format])
                path.write_text(convert(report, format), encoding="utf-8")
                echo(f"The tables are in {path}.")
        echo(f"{f'{REPORT_NAME} and {CURVES_NAME} are' if plotted else f'{REPORT_NAME} is'} in {grid.folder}.")
        panels += [panel] if panel else []
    if len(panels) > 1:
        path = Path(os.path.commonpath([grid.folder.parent for grid in grids])) / CURVES_NAME
        if _plot_curves(panels, path, echo):
            echo(f"The learning curves of all {len(panels)} recipes are in {path}.")


def _plot_curves(panels: Sequence[CurvePanel], path: Path, echo: Callable[[str], None]) -> bool:
    """Plot learning curves. Return whether the plot was written; if not, print the reason."""
    if not panels:
        echo(f"No {path.name}: no federated run logged metrics of a round.")
        return False
    try:
        plot_learning_curves(panels, path)
    except (ImportError, ValueError, OSError) as error:
        echo(f"No {path.name}: {error}")
        return False
    return True
