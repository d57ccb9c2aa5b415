"""PNG plot of the learning curves of benchmarks. It needs matplotlib (extra `plots`)."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..data.plots.matplotlib_helpers import COLORS, display_name, new_figure, use_integer_ticks


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Runs use six colors, first with solid lines and then with other dashes. Gray is reserved for baselines. Each run has
# a different marker.
CURVE_COLORS = COLORS[:6]
CURVE_DASHES = ("-", "-.", ":")
MARKERS = "osD^vPX*hd<>p8|x+1"
MAX_CURVES = len(CURVE_COLORS) * len(CURVE_DASHES)
# Grays and dashes of the baselines. A dash pattern lists the lengths of dashes and gaps, in line widths.
REFERENCE_STYLES = (("#000000", (5, 2)), ("#777777", (2, 1.5)), ("#000000", (1, 3)), ("#777777", (8, 2, 1, 2)))
MAX_REFERENCES = len(REFERENCE_STYLES)
MAX_TITLE_WIDTH = 60  # characters of a line
MAX_LABEL_LENGTH = 50  # characters of an entry of the legend
LABEL_SIZE = 9  # points
# A baseline that is farther from the curves than this multiple of their range would press them into one line.
MAX_REACH = 25
# Rounds, means over seeds, and the minima and maxima if there are several seeds.
Curve: TypeAlias = tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]


@dataclass(frozen=True)
class CurvePanel:
    """
    The learning curves of one benchmark.

    Args:
        title (`str`):
            Title of the panel.
        metric (`str`):
            Name of the metric, used as the label of the vertical axis.
        curves (`Mapping[str, Sequence[Mapping[int, float | None]]]`):
            Run name to one curve per seed. A curve maps a round to a value. Values that are not finite, or `None`, are
            ignored.
        references (`Mapping[str, Sequence[float | None]]`, *optional*):
            Baseline name to one value per seed.
        step_name (`str`, *optional*, defaults to `"round"`):
            Label of the horizontal axis.
    """

    title: str
    metric: str
    curves: Mapping[str, Sequence[Mapping[int, float | None]]]
    references: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    step_name: str = "round"


def plot_learning_curves(panels: Sequence[CurvePanel], path: str | os.PathLike[str]) -> None:
    """
    Plot a metric over the rounds, with one panel per benchmark (figure 4 of FedNLP has one line per method).

    A line is the mean over seeds, and its band ranges from the lowest to the highest seed. A line has the rounds that
    all seeds were evaluated at. Seeds without a finite value are ignored. Runs that were evaluated at different rounds
    keep their rounds. A baseline is a dashed horizontal line at its mean. A baseline far from the curves is not drawn,
    and the legend has its mean. A run has the same color, dash pattern and marker in all panels.

    Args:
        panels (`Sequence[CurvePanel]`):
            The benchmarks.
        path (`str`):
            Path of the PNG file to write.

    Raises:
        ValueError: If a panel has no finite value, or if there are more than 18 runs or 4 baselines, which cannot be
            distinguished.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> from hf_federated.reporting.learning_curves import CurvePanel, plot_learning_curves

    >>> curves = {"FedAvg": [{1: 0.4, 2: 0.5}, {1: 0.3, 2: 0.6}], "FedOpt": [{1: 0.5, 2: 0.6}, {1: 0.5, 2: 0.7}]}
    >>> path = os.path.join(tempfile.mkdtemp(), "learning_curves.png")
    >>> plot_learning_curves([CurvePanel("20 Newsgroups", "accuracy", curves, {"centralized": [0.8, 0.7]})], path)
    >>> os.path.exists(path)
    True

    ```
    """
    drawn = [
        (
            panel,
            {name: curve for name, seeds in panel.curves.items() if len((curve := _mean_curve(seeds))[0])},
            {name: values for name, seeds in panel.references.items() if (values := _finite(seeds))},
        )
        for panel in panels
    ]
    if not all(curves for _, curves, _ in drawn) or not drawn:
        empty = [panel.title for panel, curves, _ in drawn if not curves]
        raise ValueError(
            f"plot_learning_curves: no finite values to draw{f' for {empty[0]!r}' if empty else ''}. Pass at least one"
            " run with finite values."
        )
    styles = _curve_styles(name for _, curves, _ in drawn for name in curves)
    reference_styles = _reference_styles(name for _, _, references in drawn for name in references)
    names = [*styles, *reference_styles]
    labels = {name: display_name(name, MAX_LABEL_LENGTH) for name in names}
    figure, axes, legend_columns = _create_panels(len(drawn), list(labels.values()))
    lines: dict[str, Any] = {}
    reference_lines: dict[str, Any] = {}
    for axis, (panel, curves, references) in zip(axes, drawn, strict=True):
        _format_axis(axis, panel)
        for name, values in references.items():
            mean = float(np.mean(values))
            reference_lines[name] = axis.axhline(mean, linewidth=1.5, zorder=1, **reference_styles[name])
        for name, curve in curves.items():
            lines[name] = _draw_curve(axis, curve, styles[name])
        for name, mean in _leave_out_far(axis, curves.values(), references).items():
            labels[name] += f" ({mean:.3g})"
    figure.legend(
        [*(lines[name] for name in styles), *(reference_lines[name] for name in reference_styles)],
        list(labels.values()),
        loc="outside lower center",
        ncols=legend_columns,
        handlelength=3.2,
        frameon=False,
        fontsize=LABEL_SIZE,
    )
    figure.savefig(path, dpi=130)


def _create_panels(number: int, labels: Sequence[str]) -> tuple[Figure, list[Axes], int]:
    """Create a grid of axes, with space for a legend. Also return the number of columns of the legend."""
    from matplotlib.textpath import TextPath

    columns = number if number <= 3 else 2 if number == 4 else 3
    rows = -(-number // columns)
    width = 6.5 if columns == 1 else 4.6 * columns
    longest = max(TextPath((0, 0), label, size=LABEL_SIZE).get_extents().width for label in labels) / 72  # inches
    legend_columns = max(1, min(len(labels), int(width / max(1.9, longest + 0.75))))
    height = 3.4 * rows + 0.22 * -(-len(labels) // legend_columns)
    figure, axes = new_figure(width, height, nrows=rows, ncols=columns, squeeze=False)
    for unused in axes.flat[number:]:
        unused.remove()
    return figure, list(axes.flat[:number]), legend_columns


def _finite(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None and np.isfinite(value)]


def _mean_curve(seeds: Sequence[Mapping[int, float | None]]) -> Curve:
    """Return rounds, means over seeds, and the minima and maxima of several seeds, all of shape `(num_rounds,)`."""
    finite = [{number: value for number, value in seed.items() if _finite([value])} for seed in seeds]
    finite = [seed for seed in finite if seed]
    rounds = sorted(set.intersection(*(set(seed) for seed in finite))) if finite else []
    values = np.array([[seed[number] for number in rounds] for seed in finite], dtype=float)
    if len(finite) < 2 or not rounds:
        return np.array(rounds), values.ravel(), None
    return np.array(rounds), values.mean(axis=0), (values.min(axis=0), values.max(axis=0))


def _leave_out_far(axis: Axes, curves: Iterable[Curve], references: Mapping[str, list[float]]) -> dict[str, float]:
    """Limit the vertical axis to the curves and the baselines near them. Returns the means of the other baselines."""
    drawn = np.concatenate([np.concatenate([means, *(band or ())]) for _, means, band in curves])
    low, high = float(drawn.min()), float(drawn.max())
    reach = MAX_REACH * (high - low)
    means = {name: float(np.mean(values)) for name, values in references.items()}
    far = {name: mean for name, mean in means.items() if reach and not low - reach <= mean <= high + reach}
    if far:
        near = [low, high, *(mean for name, mean in means.items() if name not in far)]
        margin = 0.08 * (max(near) - min(near))
        axis.set_ylim(min(near) - margin, max(near) + margin)
    return far


def _curve_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    styles = zip(itertools.product(CURVE_DASHES, CURVE_COLORS), MARKERS, strict=True)
    return {
        name: {"color": color, "linestyle": dashes, "marker": marker}
        for name, ((dashes, color), marker) in zip(_distinct(names, MAX_CURVES, "runs"), styles, strict=False)
    }


def _reference_styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    distinct = _distinct(names, MAX_REFERENCES, "baselines")
    return {
        name: {"color": color, "linestyle": (0, dashes)}
        for name, (color, dashes) in zip(distinct, REFERENCE_STYLES, strict=False)
    }


def _distinct(names: Iterable[str], maximum: int, noun: str) -> list[str]:
    distinct = list(dict.fromkeys(names))
    if len(distinct) > maximum:
        raise ValueError(
            f"plot_learning_curves: {len(distinct)} {noun}, but at most {maximum} can be distinguished. Draw fewer."
        )
    return distinct


def _wrap(title: str) -> str:
    """Distribute a title over lines of about the same length."""
    num_lines = -(-len(title) // MAX_TITLE_WIDTH)
    width = len(title) if num_lines < 2 else len(title) // num_lines + 10
    return textwrap.fill(title, width=max(width, 1))


def _format_axis(axis: Axes, panel: CurvePanel) -> None:
    use_integer_ticks(axis.xaxis)
    axis.set_title(_wrap(display_name(panel.title, max_length=120)), fontsize=10)
    axis.set_xlabel(panel.step_name)
    axis.set_ylabel(display_name(panel.metric.replace("_", " ")))
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)  # grid lines do not cover the baselines
    axis.margins(y=0.08)


def _draw_curve(axis: Axes, curve: Curve, style: Mapping[str, Any]) -> Any:
    rounds, means, band = curve
    # About ten markers per line. More markers would hide the line.
    (line,) = axis.plot(rounds, means, linewidth=1.6, markersize=5, markevery=max(1, len(rounds) // 10), **style)
    if band is not None:
        lower, upper = band
        if len(rounds) == 1:  # fill_between draws nothing for a single round
            axis.vlines(rounds, lower, upper, color=style["color"], alpha=0.4, linewidth=2)
        else:
            axis.fill_between(rounds, lower, upper, color=style["color"], alpha=0.15, linewidth=0)
    return line
