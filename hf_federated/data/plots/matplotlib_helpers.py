"""Helpers that all plots share: colors, figures without a window, and display names. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Paul Tol's "bright" color scheme. Its colors are distinct for color-blind readers and in print.
COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
MAX_NAME_LENGTH = 24


def require_matplotlib() -> None:
    """
    Check that matplotlib is installed.

    Raises:
        ImportError: If matplotlib is not installed. The message names the extra to install.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("Plots need matplotlib. Install it with: pip install hf-federated[plots]")


def new_figure(width: float, height: float, **kwargs: Any) -> tuple[Figure, Any]:
    """
    Create a figure of the given size in inches and its axes. `kwargs` are passed to `Figure.subplots` of matplotlib.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot is not used, because it keeps a reference to every figure and may open a window.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(**kwargs)
    for axis in np.ravel(axes):
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def use_integer_ticks(axis: Axis) -> None:
    """
    Place the ticks of a horizontal or vertical axis at integers only, such as rounds or numbers of examples.

    Args:
        axis (`matplotlib.axis.Axis`): `axes.xaxis` or `axes.yaxis`.
    """
    from matplotlib.ticker import MaxNLocator

    # By default, an axis with a single integer, such as a run of one round, gets ticks at fractions.
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def display_name(name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """Format a client or label name for matplotlib: on one line, truncated, and without math formatting."""
    name = " ".join(name.split())
    name = name if len(name) <= max_length else f"{name[: max_length - 1]}…"
    # matplotlib omits names that start with an underscore from the legend.
    return (f" {name}" if name.startswith("_") else name).replace("$", r"\$")
