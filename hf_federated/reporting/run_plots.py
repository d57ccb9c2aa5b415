"""PNG plot of a run. It needs matplotlib (extra `plots`), which is imported when a plot is drawn.

Plots of a partition are in `hf_federated.data.plots.partition_plots`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..data.plots.matplotlib_helpers import COLORS, new_figure, require_matplotlib, use_integer_ticks
from ..data.plots.partition_plots import plot_partition


if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_learning_curve", "plot_partition", "require_matplotlib"]


def plot_learning_curve(
    log_history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    metric: str = "eval_accuracy",
    references: Mapping[str, float] | None = None,
    step_name: str = "round",
) -> None:
    """
    Plot a metric, and the training loss if it was logged, over the rounds or steps of a run.

    Args:
        log_history (`Sequence[Mapping[str, Any]]`):
            `trainer.state.log_history`.
        path (`str`):
            Path of the PNG file to write.
        metric (`str`, *optional*, defaults to `"eval_accuracy"`):
            Name of the logged metric to plot.
        references (`Mapping[str, float]`, *optional*):
            Baseline name to value. Baselines are drawn as dashed horizontal lines.
        step_name (`str`, *optional*, defaults to `"round"`):
            Meaning of a step of the log: `"round"`, or `"optimizer step"` for a split model.

    Raises:
        ValueError: If the metric was never logged. The message lists the logged metrics.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> from hf_federated.reporting.run_plots import plot_learning_curve

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
        raise ValueError(
            f"{metric!r} was never logged. Logged metrics: {', '.join(logged) or 'none'}. Pass a logged metric."
        )
    loss = _series(log_history, "loss")
    figure, axes = new_figure(9 if loss else 5.5, 3.6, ncols=2 if loss else 1, squeeze=False)
    is_federated = step_name == "round"
    name = f"{'federated' if is_federated else 'split'} {curve[max(curve)]:.3f}"
    _draw_curve(axes[0, 0], curve, step_name, metric.removeprefix("eval_").replace("_", " "), name)
    for color, (name, value) in zip(COLORS[1:], (references or {}).items(), strict=False):
        axes[0, 0].axhline(value, color=color, linestyle="--", linewidth=1.5, label=f"{name} {value:.3f}")
    axes[0, 0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=9)
    axes[0, 0].margins(y=0.12)
    axes[0, 0].set_title("held-out examples", fontsize=10)
    if loss:
        _draw_curve(axes[0, 1], loss, step_name, "training loss")
        axes[0, 1].set_title(
            "mean over the clients of the round" if is_federated else "mean since the previous logged step",
            fontsize=10,
        )
    figure.savefig(path, dpi=130)


def _series(log_history: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Return step to value. If a step was logged twice, the last value is used."""
    return {int(entry["step"]): float(entry[key]) for entry in log_history if key in entry}


def _draw_curve(
    axis: Axes, series: Mapping[int, float], step_name: str, quantity: str, name: str | None = None
) -> None:
    axis.plot(list(series), list(series.values()), color=COLORS[0], marker="o", markersize=4, label=name)
    use_integer_ticks(axis.xaxis)
    axis.set_xlabel(step_name)
    axis.set_ylabel(quantity)
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
