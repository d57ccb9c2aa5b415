"""PNG plot of the sizes of clients. It needs matplotlib (extra `plots`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .matplotlib_helpers import COLORS, MAX_NAMED_CLIENTS, display_name, new_figure, to_settings, use_integer_ticks


if TYPE_CHECKING:
    from matplotlib.axes import Axes

# If the largest client has more than this many times the rows of the smallest client, the size axis is logarithmic.
LOG_RATIO = 20


def plot_sizes(
    sizes: Sequence[int] | np.ndarray | Mapping[str, Sequence[int] | np.ndarray], path: str | os.PathLike[str]
) -> None:
    """
    Plot the distribution of client sizes: the share of clients with at most a given number of examples.

    Up to 30 clients are drawn as points. With more clients, a histogram is drawn above the distribution (figure 8 of
    FedNLP has one line per β). The axis is logarithmic if the largest client has more than 20 times the examples of
    the smallest client.

    Args:
        sizes (`Sequence[int]` or `Mapping[str, Sequence[int]]`):
            Number of examples of each client, such as `list(clients.num_rows.values())`, or a mapping from setting
            name to sizes with up to seven settings.
        path (`str`):
            Path of the PNG file to write.

    Raises:
        ValueError: If the mapping is empty, a client has no examples, or there are more settings than colors.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> from hf_federated.data import plot_sizes

    >>> path = os.path.join(tempfile.mkdtemp(), "sizes.png")
    >>> plot_sizes({"β = 1": [3, 20, 60], "β = 5": [20, 25, 38]}, path)
    >>> os.path.exists(path)
    True

    ```
    """
    settings = {name: _sorted_sizes(values, name) for name, values in to_settings(sizes, "plot_sizes").items()}
    if len(settings) > len(COLORS):
        raise ValueError(f"plot_sizes: {len(settings)} settings, but at most {len(COLORS)} can be drawn. Draw fewer.")
    smallest, largest = (int(bound([bound(values) for values in settings.values()])) for bound in (min, max))
    logarithmic = largest > LOG_RATIO * smallest
    many_clients = max(map(len, settings.values())) > MAX_NAMED_CLIENTS
    if many_clients:
        figure, (histogram, axis) = new_figure(7, 5, nrows=2, sharex=True, height_ratios=(2, 3))
        bounds = (np.geomspace if logarithmic else np.linspace)(smallest, largest + 1, 31)
        edges = np.unique(np.round(bounds)) - 0.5  # every bin contains at least one integer
        _draw_histogram(histogram, settings, edges.tolist())
    else:
        figure, axis = new_figure(7, 3.6)
    for color, (setting, values) in zip(COLORS, settings.items(), strict=False):
        label = f"{display_name(setting) or 'clients'}: {values[0]} to {values[-1]}, median {np.median(values):g}"
        share = np.arange(1, len(values) + 1) / len(values)
        axis.step([values[0], *values], [0, *share], where="post", color=color, linewidth=1.5, label=label)
        if len(values) <= MAX_NAMED_CLIENTS:
            axis.plot(values, share, "o", color=color, markersize=5, clip_on=False)
    if logarithmic:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    else:
        use_integer_ticks(axis.xaxis)
        if smallest == largest:
            axis.set_xlim(smallest - 2, largest + 2)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("number of examples")
    axis.set_ylabel("share of clients with at most this number")
    axis.grid(color="#dddddd", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _sorted_sizes(sizes: Iterable[int], setting: str) -> np.ndarray:
    values = np.asarray(sizes)
    if values.ndim != 1 or len(values) == 0 or values.dtype.kind not in "iu" or values.min() < 1:
        of_setting = f" of {setting!r}" if setting else ""
        raise ValueError(
            f"plot_sizes: the sizes{of_setting} must be one-dimensional integers of at least 1. For a"
            " FederatedDataset, pass list(clients.num_rows.values())."
        )
    return np.sort(values)


def _draw_histogram(axis: Axes, settings: Mapping[str, np.ndarray], edges: list[float]) -> None:
    for color, values in zip(COLORS, settings.values(), strict=False):
        weights = np.full(len(values), 1 / len(values))
        axis.hist(values, edges, weights=weights, histtype="stepfilled", color=color, alpha=0.25)
        axis.hist(values, edges, weights=weights, histtype="step", color=color, linewidth=1.5)
    axis.set_ylabel("share of clients")
