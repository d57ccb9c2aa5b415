"""What all plots share: colours, figures without a window, names that fit. Needs matplotlib (extra `plots`)."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Paul Tol's "bright" scheme, which stays distinct for colour-blind readers and in print.
COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
MAX_NAME_LENGTH = 24


def require_matplotlib() -> None:
    """
    Raises:
        ImportError: If matplotlib is not installed. The message names the extra that brings it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("Plots need matplotlib. Install it with: pip install hf-federated[plots]")


def new_figure(width: float, height: float, **kwargs: Any) -> tuple[Figure, Any]:
    """
    A figure of this size in inches and its axes; `kwargs` are those of matplotlib's `Figure.subplots`.
    """
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


def shown_name(name: str, max_length: int = MAX_NAME_LENGTH) -> str:
    """A name of a client or label as matplotlib may draw it: on one line, cut, and never read as a formula."""
    name = " ".join(name.split())
    name = name if len(name) <= max_length else f"{name[: max_length - 1]}…"
    # A legend leaves out names that begin with an underscore.
    return (f" {name}" if name.startswith("_") else name).replace("$", r"\$")
