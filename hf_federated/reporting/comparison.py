"""A comparison of runs: one table and one picture, as text, Markdown or a page."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.printable import printable
from .html_page import Curve, heading, line_chart, page, paragraph, pictures, table
from .metric_names import lower_is_better
from .run_tables import duration, metric_label, number, size
from .saved_run import SavedRun
from .svg_file import Panel, svg_file


# Longest cell of a table.
_MAX_CELL = 60
# Largest number of lines of baselines in a picture.
_MAX_REFERENCES = 4
# Units of the horizontal axis, by their number of bytes.
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
_INTRODUCTION = "The settings that differ, the results of the final models, bytes and time. Bold values are best."


@dataclass(frozen=True)
class Row:
    """
    A row of a comparison: what is compared, and one value for each run.

    Args:
        name (`str`): What is compared.
        cells (`Sequence[str | None]`): The values, or `None` where a run has no value.
        best (`frozenset[int]`): Positions of the best runs.
    """

    name: str
    cells: Sequence[str | None]
    best: frozenset[int] = frozenset()


class Comparison:
    """
    Compares runs: the settings that differ, metrics with the best values marked, bytes and time.

    Args:
        runs (`Sequence[SavedRun]`): The runs, at least two, with different names.
        metric (`str`, *optional*): Metric of the picture. By default, the metric that most runs have logged, with
            preference for `metric_for_best_model`, or the training loss if there was no evaluation.

    Raises:
        ValueError: If there are fewer than two runs, or no run has the metric. The message names the metrics.

    Example:

    ```python
    >>> from hf_federated.reporting.comparison import Comparison
    >>> from hf_federated.reporting.saved_run import read_saved_run

    >>> runs = [read_saved_run(folder) for folder in ("outputs/fedavg", "outputs/fedprox")]  # doctest: +SKIP
    >>> print(Comparison(runs).to_markdown())  # doctest: +SKIP
    ```
    """

    def __init__(self, runs: Sequence[SavedRun], metric: str | None = None) -> None:
        if len(runs) < 2:
            raise ValueError(f"a comparison needs at least two runs, but there are {len(runs)}.")
        self.runs = list(runs)
        self.metric = self._find_metric(metric)

    def _find_metric(self, metric: str | None) -> str:
        counts: dict[str, int] = {}
        for run in self.runs:
            for name in run.view.metrics:
                counts[name] = counts.get(name, 0) + 1
        if metric is None:
            # `view.metrics` begins with the metric for the best model, and `max` returns the first maximum.
            return max(counts, key=lambda name: counts[name]) if counts else "loss"
        for name in (metric, f"eval_{metric}"):
            if name in counts or any(run.curve(name) for run in self.runs):
                return name
        shown = ", ".join(sorted(name.removeprefix("eval_") for name in counts)) or "none"
        raise ValueError(f"no run has logged the metric {metric!r}. The logged metrics are: {shown}.")

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        step = self.runs[0].view.step_name
        rows = [Row("state", [run.view.state for run in self.runs])]
        rows += [Row(name, [_setting(run, name) for run in self.runs]) for name in self.differing_settings()]
        rows.append(Row(f"{step}s", [f"{run.view.num_finished} of {run.view.start.num_rounds}" for run in self.runs]))
        names = dict.fromkeys(name for run in self.runs for name in run.metrics)
        main = self.metric.removeprefix("eval_")
        for name in sorted(names, key=lambda each: (each != main, each == "loss")):
            rows.append(self._metric_row(name))
        losses = [run.view.last("loss") for run in self.runs]
        rows.append(_best_row("training loss", losses, number, lower=True))
        totals = [run.total_bytes for run in self.runs]
        for position, what in enumerate(("bytes to clients", "bytes from clients")):
            values = [None if total is None else total[position] for total in totals]
            rows.append(self._cost_row(what, values, size))
        rows.append(self._cost_row("time", [run.seconds for run in self.runs], duration))
        each = [run.view.seconds_per_round() for run in self.runs]
        rows.append(Row(f"time a {step}", [None if value is None else duration(value) for value in each]))
        return [row for row in rows if any(cell is not None for cell in row.cells)]

    def differing_settings(self) -> list[str]:
        """Return the names of the settings that differ between the runs."""
        names = dict.fromkeys(name for run in self.runs for name in run.settings)
        return [name for name in names if len({_setting(run, name) for run in self.runs} - {None}) > 1]

    def _metric_row(self, name: str) -> Row:
        start = next((run.view.start for run in self.runs if run.view.start.best_metric is not None), None)
        lower = lower_is_better(name, start.best_metric if start else None, start.greater_is_better if start else None)
        label = "evaluation loss" if name == "loss" else metric_label(name)
        return _best_row(label, [run.metrics.get(name) for run in self.runs], number, lower)

    def _cost_row(self, name: str, values: Sequence[float | None], text: Callable[[Any], str | None]) -> Row:
        """Return a row of costs. The lowest cost is marked if all runs are complete."""
        if all(run.view.state == "complete" for run in self.runs):
            return _best_row(name, values, text, lower=True)
        return Row(name, [None if value is None else text(value) for value in values])

    # ---- Pictures

    def charts(self) -> list[Panel]:
        """Return the charts: the metric by round and by bytes."""
        label = "training loss" if self.metric == "loss" else metric_label(self.metric)
        step = self.runs[0].view.step_name
        by_round = [Curve(run.name, run.curve(self.metric)) for run in self.runs]
        points = [run.curve_by_bytes(self.metric) for run in self.runs]
        most = max((x for curve in points for x, _ in curve), default=0.0)
        unit, scale = next(((name, value) for name, value in _UNITS.items() if most >= value), ("bytes", 1.0))
        scaled = [[(x / scale, y) for x, y in curve] for curve in points]
        by_bytes = [Curve(run.name, curve) for run, curve in zip(self.runs, scaled, strict=True)]
        lines = self.references()
        charts = [
            Panel(f"{label} by {step}", step, by_round, lines),
            Panel(f"{label} by bytes", f"{unit} in both directions", by_bytes, lines),
        ]
        return [chart for chart in charts if any(curve.points for curve in chart.curves)]

    def references(self) -> dict[str, float]:
        """Return the values of the baselines for the metric of the picture, by name."""
        name = self.metric.removeprefix("eval_")
        found: dict[str, float] = {}
        for run in self.runs:
            for baseline, metrics in run.baselines.items():
                if name in metrics:
                    label = (
                        baseline if found.get(baseline, metrics[name]) == metrics[name] else f"{baseline}, {run.name}"
                    )
                    found[label] = metrics[name]
        return dict(list(found.items())[:_MAX_REFERENCES])

    # ---- Formats

    def to_html(self) -> str:
        """Return a self-contained page."""
        rows = self.rows()
        classes = {(line, column + 1): "best" for line, row in enumerate(rows) for column in row.best}
        cells = [[row.name, *row.cells] for row in rows]
        header = ["", *(run.name for run in self.runs)]
        figures = [line_chart(chart.curves, chart.title, chart.x_name, chart.references) for chart in self.charts()]
        body = [
            paragraph(_INTRODUCTION),
            table(header, cells, classes, _MAX_CELL),
            heading("Curves"),
            pictures(figures) if figures else paragraph("No run has logged a value."),
        ]
        return page(f"Comparison of {len(self.runs)} runs", body)

    def to_markdown(self, picture: str | None = None) -> str:
        """
        Return a Markdown section.

        Args:
            picture (`str`, *optional*): Path of the picture that the text shows.
        """
        lines = [f"# Comparison of {len(self.runs)} runs", ""]
        lines.append(_INTRODUCTION)
        cells = [
            [_markdown(row.name), *(_bold(cell, position in row.best) for position, cell in enumerate(row.cells))]
            for row in self.rows()
        ]
        lines += ["", _markdown_line(["", *map(_markdown, (run.name for run in self.runs))])]
        lines.append("|" + "|".join([":---", *["---:"] * len(self.runs)]) + "|")
        lines += map(_markdown_line, cells)
        if picture is not None and self.charts():
            titles = " and ".join(chart.title for chart in self.charts())
            lines += ["", f"![{_markdown(titles)}]({picture})"]
        return "\n".join(lines) + "\n"

    def to_svg(self) -> str | None:
        """Return the picture as an SVG file, or `None` if no run has logged a value."""
        charts = self.charts()
        return svg_file(charts) if charts else None

    def to_text(self) -> list[list[str]]:
        """Return the cells of the table for a terminal. The best values end in `*`."""
        cells = [["", *(run.name for run in self.runs)]]
        for row in self.rows():
            marks = ["*" if position in row.best else "" for position in range(len(row.cells))]
            shown = [f"{'-' if cell is None else cell}{mark}" for cell, mark in zip(row.cells, marks, strict=True)]
            cells.append([row.name, *shown])
        return cells


def _setting(run: SavedRun, name: str) -> str | None:
    """
    The value of a setting, `"-"` if it is not set, or `None` if the run has not recorded it.

    Runs of earlier versions have not recorded all settings, and runs of scripts have no recipe.
    """
    if name in run.settings:
        return run.settings[name]
    section, dot, _ = name.partition(".")
    is_recorded = any(each.startswith(f"{section}.") for each in run.settings)
    is_recorded |= section.removesuffix("_kwargs") in run.settings
    return "-" if dot and is_recorded else None


def _best_row(name: str, values: Sequence[float | None], text: Callable[[Any], str | None], lower: bool) -> Row:
    """Return a row of numbers with the best ones, if at least two runs have one and they differ."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    best = (min if lower else max)(known) if len(known) > 1 and min(known) < max(known) else None
    cells = [None if value is None else text(value) for value in values]
    return Row(
        name, cells, frozenset(place for place, value in enumerate(values) if best is not None and value == best)
    )


def _markdown(text: str) -> str:
    """Escape a text for a cell of a table in Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>|#!~&])", r"\\\1", printable(text, _MAX_CELL))


def _bold(cell: str | None, is_best: bool) -> str:
    text = "" if cell is None else _markdown(cell)
    return f"**{text}**" if is_best else text


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
