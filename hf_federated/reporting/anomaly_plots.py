"""PNG plot of the anomaly report of a run. It needs matplotlib (extra `plots`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..data.plots.matplotlib_helpers import COLORS, display_name, new_figure, use_integer_ticks


if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The number of each round with the value in this round.
Points: TypeAlias = list[tuple[int, float]]
# Clients that are drawn in a color. All other clients are gray.
MAX_HIGHLIGHTED = 5
GRAY = "#aaaaaa"


def plot_anomalies(rounds: Mapping[int, Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """
    Plot the norms and cosines of all updates over the rounds of a run.

    The left panel shows the norm of each update divided by the median norm of its round, on a logarithmic axis. The
    right panel shows the cosine with the change of the global model. The clients that differ most from the others are
    colored: the largest mean of `|log(norm ratio)| + (median cosine − cosine)`.

    Args:
        rounds (`Mapping[int, Mapping[str, Any]]`):
            `rounds` of an [`AnomalyReport`], or the return value of
            [`~hf_federated.server.load_anomalies`].
        path (`str`):
            Path of the PNG file to write.

    Raises:
        ValueError: If no round has an update.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> from hf_federated.reporting.anomaly_plots import plot_anomalies

    >>> clients = {"north": {"norm": 1.0, "cosine": 0.9}, "south": {"norm": 9.0, "cosine": -0.5}}
    >>> path = os.path.join(tempfile.mkdtemp(), "anomalies.png")
    >>> plot_anomalies({0: {"clients": clients}, 1: {"clients": clients}}, path)
    >>> os.path.exists(path)
    True

    ```
    """
    ratios, cosines, scores = _series(rounds)
    if not scores:
        raise ValueError("plot_anomalies: no round has an update. Pass the report of a run with at least one round.")
    ranked = sorted(scores, key=lambda client_id: -float(np.mean(scores[client_id])))
    colors = dict(zip(ranked[:MAX_HIGHLIGHTED], COLORS, strict=False))
    figure, (left, right) = new_figure(9, 3.8, ncols=2)
    # The colored clients are drawn last.
    order = [*ranked[MAX_HIGHLIGHTED:], *reversed(ranked[:MAX_HIGHLIGHTED])]
    _draw_clients(left, {client_id: ratios.get(client_id, []) for client_id in order}, colors)
    _draw_clients(right, {client_id: cosines.get(client_id, []) for client_id in order}, colors)
    left.set_ylabel("norm / median norm of the round")
    right.set_ylabel("cosine with the global change")
    left.set_yscale("log")
    right.set_ylim(-1.05, 1.05)
    for client_id, color in colors.items():
        left.plot([], [], color=color, marker="o", markersize=3.5, label=display_name(client_id))
    figure.legend(loc="outside lower center", ncols=MAX_HIGHLIGHTED, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _series(
    rounds: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, Points], dict[str, Points], dict[str, list[float]]]:
    """The norm ratios and the cosines of each client over the rounds, and its difference from the other clients."""
    ratios: dict[str, Points] = {}
    cosines: dict[str, Points] = {}
    scores: dict[str, list[float]] = {}
    for number, values in sorted(rounds.items()):
        clients = values["clients"]
        norms = [client["norm"] for client in clients.values() if client["norm"] > 0]
        angles = [client["cosine"] for client in clients.values() if client["cosine"] is not None]
        for client_id, client in clients.items():
            score = 0.0
            if client["norm"] > 0:
                ratio = client["norm"] / float(np.median(norms))
                ratios.setdefault(client_id, []).append((number + 1, ratio))
                score += abs(float(np.log(ratio)))
            if client["cosine"] is not None:
                cosines.setdefault(client_id, []).append((number + 1, client["cosine"]))
                score += max(0.0, float(np.median(angles)) - client["cosine"])
            scores.setdefault(client_id, []).append(score)
    return ratios, cosines, scores


def _draw_clients(axis: Axes, series: Mapping[str, Points], colors: Mapping[str, str]) -> None:
    """Draw one line for each client. Clients without a color are gray and thin."""
    for client_id, points in series.items():
        axis.plot(
            [number for number, _ in points],
            [value for _, value in points],
            color=colors.get(client_id, GRAY),
            marker="o",
            markersize=3.5,
            linewidth=1.0 if client_id in colors else 0.5,
            alpha=1.0 if client_id in colors else 0.6,
        )
    use_integer_ticks(axis.xaxis)
    axis.set_xlabel("round")
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
