"""Helpers that all plots share: colors, figures without a window, and display names. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...utils.optional_packages import require_packages


if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Paul Tol's "bright" color scheme. Its colors are distinct for color-blind readers and in print.
COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
MAX_NAME_LENGTH = 24
# With more clients, their names do not fit below the axis.
MAX_NAMED_CLIENTS = 30
# What a plot shows for one setting.
Setting = TypeVar("Setting")


def require_matplotlib() -> None:
    """
    Check that matplotlib is installed.

    Raises:
        ImportError: If matplotlib is not installed. The message names the extra to install.
    """
    require_packages("a plot", {"plots": {"matplotlib": "matplotlib"}})


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


def to_settings(one_or_several: Setting | Mapping[str, Setting], function: str) -> dict[str, Setting]:
    """Return a dictionary from panel title to partition. A single partition has an empty title."""
    if not isinstance(one_or_several, Mapping):
        return {"": one_or_several}
    if not one_or_several:
        raise ValueError(f"{function}: the mapping of settings is empty. Pass at least one setting.")
    return {str(name): value for name, value in one_or_several.items()}
