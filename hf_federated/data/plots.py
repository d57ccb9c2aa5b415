"""PNG plots of a run and of a partition. Need matplotlib (extra `plots`), which is imported when a plot is drawn."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "bright" scheme, which stays distinct for colour-blind readers and in print.
COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
# Above this many labels bars have too many colours to tell apart, and a heat map is drawn.
MAX_BAR_LABELS = len(COLORS)
# Above this many clients their names do not fit below the axis.
MAX_NAMED_CLIENTS = 30


def require_matplotlib() -> None:
    """
    Raises:
        ImportError: If matplotlib is not installed. The message names the extra that brings it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("Plots need matplotlib. Install it with: pip install hf-federated[plots]")


def _figure(width: float, height: float, **kwargs: Any) -> tuple[Figure, Any]:
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: that keeps every figure alive and may open a window.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**kwargs)
    for axis in np.ravel(axes):
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_learning_curve(
    log_history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    metric: str = "eval_accuracy",
    references: Mapping[str, float] | None = None,
) -> None:
    """
    Draws a metric, and the training loss if it was logged, over the rounds of a run.

    Args:
        log_history (`Sequence[Mapping[str, Any]]`):
            `trainer.state.log_history`; a step is a round.
        path (`str`):
            The PNG file to write.
        metric (`str`, *optional*, defaults to `"eval_accuracy"`):
            The logged metric to draw.
        references (`Mapping[str, float]`, *optional*):
            Values to compare with, drawn as dashed horizontal lines: name to value.

    Raises:
        ValueError: If the metric was never logged. The message lists what was.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> from hf_federated.data.plots import plot_learning_curve

    >>> logs = [{"step": 1, "eval_accuracy": 0.6}, {"step": 2, "eval_accuracy": 0.7}]
    >>> path = os.path.join(tempfile.mkdtemp(), "curve.png")
    >>> plot_learning_curve(logs, path, references={"centralized": 0.75})
    >>> os.path.exists(path)
    True

    ```
    """
    curve = _series(log_history, metric)
    if not curve:
        logged = sorted({key for entry in log_history for key in entry if key.startswith("eval_")})
        raise ValueError(f"{metric!r} was never logged, so it has no curve. Logged: {', '.join(logged) or 'nothing'}.")
    loss = _series(log_history, "loss")
    figure, axes = _figure(9 if loss else 5.5, 3.6, ncols=2 if loss else 1, squeeze=False)
    _draw_curve(
        axes[0, 0], curve, metric.removeprefix("eval_").replace("_", " "), f"federated {curve[max(curve)]:.3f}"
    )
    for color, (name, value) in zip(COLORS[1:], (references or {}).items(), strict=False):
        axes[0, 0].axhline(value, color=color, linestyle="--", linewidth=1.5, label=f"{name} {value:.3f}")
    axes[0, 0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=9)
    axes[0, 0].margins(y=0.12)
    axes[0, 0].set_title("held-out rows", fontsize=10)
    if loss:
        _draw_curve(axes[0, 1], loss, "training loss")
        axes[0, 1].set_title("mean of the round's clients", fontsize=10)
    figure.savefig(path, dpi=130)


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Round to value; the last one if a round was logged twice."""
    return {int(entry["step"]): float(entry[key]) for entry in log_history if key in entry}


def _draw_curve(axis: Axes, series: Mapping[int, float], quantity: str, name: str | None = None) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.plot(list(series), list(series.values()), color=COLORS[0], marker="o", markersize=4, label=name)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("round")
    axis.set_ylabel(quantity)
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)


def plot_partition(
    label_counts: Mapping[str, Sequence[int]],
    path: str | os.PathLike[str],
    label_names: Sequence[str] | None = None,
) -> None:
    """
    Draws how many rows of each label each client has.

    Up to 30 clients are named and stand side by side as stacked bars of rows. More are drawn as stacked shares over
    their numbers of rows. With more than seven labels it is a heat map of shares instead. Clients are ordered by their
    share of the first label; in a heat map by their most frequent label.

    Args:
        label_counts (`Mapping[str, Sequence[int]]`):
            Client id to its number of rows of each label.
        path (`str`):
            The PNG file to write.
        label_names (`Sequence[str]`, *optional*):
            The labels' names; their numbers by default.

    Raises:
        ValueError: If there is no client, or the clients differ in their number of labels.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> from hf_federated.data.plots import plot_partition

    >>> path = os.path.join(tempfile.mkdtemp(), "partition.png")
    >>> plot_partition({"a": [3, 1], "b": [0, 5]}, path, label_names=["bad", "good"])
    >>> os.path.exists(path)
    True

    ```
    """
    if len({len(counts) for counts in label_counts.values()}) != 1:
        raise ValueError("plot_partition needs at least one client, and as many counts for each as there are labels.")
    counts = np.array(list(label_counts.values()), dtype=np.int64)  # (clients, labels)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = list(label_names) if label_names is not None else [str(number) for number in range(counts.shape[1])]
    many_labels, many_clients = len(names) > MAX_BAR_LABELS, len(counts) > MAX_NAMED_CLIENTS
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)) if many_labels else (-shares[:, 0],))
    counts, shares, ids = counts[order], shares[order], [list(label_counts)[position] for position in order]
    width = 9 if many_clients else 4.5 + 0.22 * len(ids)
    if many_labels:
        figure, axes = _figure(width, 2.5 + 0.2 * len(names), squeeze=False)
        _draw_heat_map(figure, axes[0, 0], shares, names)
    elif many_clients:
        figure, axes = _figure(width, 5, nrows=2, sharex=True, squeeze=False, height_ratios=(3, 1))
        _draw_bars(axes[0, 0], shares, names, 1.0, "share of rows")
        _draw_bars(axes[1, 0], counts.sum(axis=1, keepdims=True), None, 1.0, "rows")
    else:
        figure, axes = _figure(width, 4, squeeze=False)
        _draw_bars(axes[0, 0], counts, names, 0.8, "rows")
    if many_clients:
        axes[-1, 0].set_xlabel(
            f"{len(ids)} clients, by their {'most frequent label' if many_labels else f'share of {names[0]!r}'}"
        )
    else:
        short = [name if len(name) <= 20 else f"{name[:19]}…" for name in ids]
        axes[0, 0].set_xticks(range(len(ids)), short, rotation=90)
    rows = counts.sum(axis=1)
    axes[0, 0].set_title(
        f"{rows.sum()} rows of {len(ids)} clients, {rows.min()} to {rows.max()}, median {np.median(rows):g}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_bars(axis: Axes, heights: np.ndarray, names: Sequence[str] | None, width: float, quantity: str) -> None:
    """Stacked bars, one a row of `heights`; without names a single grey one."""
    bottom = np.zeros(len(heights))
    for label in range(heights.shape[1]):
        color, name = (COLORS[label], names[label]) if names is not None else (COLORS[-1], None)
        axis.bar(range(len(heights)), heights[:, label], width, bottom, color=color, label=name)
        bottom += heights[:, label]
    axis.set_xlim(-0.5, len(heights) - 0.5)
    axis.set_ylabel(quantity)
    if names is not None:
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)


def _draw_heat_map(figure: Figure, axis: Axes, shares: np.ndarray, names: Sequence[str]) -> None:
    image = axis.imshow(shares.T, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axis.set_yticks(range(len(names)), names)
    figure.colorbar(image, ax=axis, label="share of the client's rows")
