"""PNG plots of a partition: labels, divergence and sizes. Need matplotlib (extra `plots`).

Each takes one partition, or several by the name of their setting to be drawn side by side on one scale. Up to 30
clients are named and keep their order; more are sorted, and counted below the axis. The words of clients are drawn in
`text_plots.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np

from ..statistics.label_statistics import LabelCounts
from .figures import COLORS, new_figure, require_matplotlib, shown_name


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Above this many labels bars have too many colours to tell apart, and a heat map is drawn.
MAX_BAR_LABELS = len(COLORS)
# Above this many clients their names do not fit below the axis.
MAX_NAMED_CLIENTS = 30
# Above this many labels their names do not fit beside the axis.
MAX_NAMED_LABELS = 60
# Up to this many clients a matrix has room for its numbers.
MAX_WRITTEN_CLIENTS = 10
MAX_COLUMNS = 4
# From this ratio of the largest to the smallest client on, sizes are drawn on a logarithmic axis.
LOG_RATIO = 20


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
    >>> from hf_federated.data import plot_partition

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
    numbers = [str(number) for number in range(counts.shape[1])]
    names = [shown_name(name) for name in (numbers if label_names is None else label_names)]
    many_labels, many_clients = len(names) > MAX_BAR_LABELS, len(counts) > MAX_NAMED_CLIENTS
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)) if many_labels else (-shares[:, 0],))
    counts, shares, ids = counts[order], shares[order], [list(label_counts)[position] for position in order]
    width = 9 if many_clients else 4.5 + 0.22 * len(ids)
    if many_labels:
        figure, axes = new_figure(width, 2.5 + 0.2 * len(names), squeeze=False)
        _draw_heat_map(figure, axes[0, 0], shares, names)
    elif many_clients:
        figure, axes = new_figure(width, 5, nrows=2, sharex=True, squeeze=False, height_ratios=(3, 1))
        _draw_bars(axes[0, 0], shares, names, 1.0, "share of rows")
        _draw_bars(axes[1, 0], counts.sum(axis=1, keepdims=True), None, 1.0, "rows")
    else:
        figure, axes = new_figure(width, 4, squeeze=False)
        _draw_bars(axes[0, 0], counts, names, 0.8, "rows")
    if many_clients:
        axes[-1, 0].set_xlabel(
            f"{len(ids)} clients, by their {'most frequent label' if many_labels else f'share of {names[0]!r}'}"
        )
    else:
        _name_clients(axes[0, 0].xaxis, ids, rotation=90)
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


def plot_label_shares(counts: LabelCounts | Mapping[str, LabelCounts], path: str | os.PathLike[str]) -> None:
    """
    Draws the share of each label in each client's rows as a heat map, a column a client.

    Several partitions stand side by side on one colour scale, from 0 to the largest share of all (figure 3 of FedNLP).
    More than 30 clients are ordered by their most frequent label.

    Args:
        counts ([`LabelCounts`] or `Mapping[str, LabelCounts]`):
            The counts of [`label_counts`], or several by the name of their setting, with the same labels.
        path (`str`):
            The PNG file to write.

    Raises:
        ValueError: If there is nothing to draw, or the partitions differ in their labels.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> import numpy as np
    >>> from hf_federated.data import LabelCounts, plot_label_shares

    >>> counts = LabelCounts(["anna", "ben"], ["bad", "good"], np.array([[3, 1], [0, 4]]))
    >>> path = os.path.join(tempfile.mkdtemp(), "labels.png")
    >>> plot_label_shares(counts, path)
    >>> os.path.exists(path)
    True

    ```
    """
    settings = _settings(counts, "plot_label_shares")
    label_names = next(iter(settings.values())).label_names
    for setting, labels in settings.items():
        if labels.label_names != label_names:
            raise ValueError(
                f"plot_label_shares: {setting!r} has the labels {labels.label_names[:10]}, and"
                f" {next(iter(settings))!r} has {label_names[:10]}. Only partitions of the same labels share an axis."
            )
    named = max(len(labels.client_ids) for labels in settings.values()) <= MAX_NAMED_CLIENTS
    names = [shown_name(name) for name in label_names]
    height = 1.3 + (1.2 if named else 0) + min(max(0.18 * len(names), 1.6), 9.0)
    figure, axes = _panels(len(settings), 3.4 if len(settings) > 1 else 7.0, height, extra_width=2.2)
    largest = max(float(labels.shares.max()) for labels in settings.values())
    for axis, (setting, labels) in zip(axes, settings.items(), strict=True):
        shares, ids = labels.shares, labels.client_ids
        if len(ids) > MAX_NAMED_CLIENTS:
            shares = shares[np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))]
            axis.set_xlabel(f"{len(ids)} clients, by their\nmost frequent label")
        else:
            _name_clients(axis.xaxis, ids, rotation=90)
        image = _draw_matrix(axis, shares.T, largest, aspect="auto")
        axis.set_title(shown_name(setting), fontsize=10)
        axis.set_yticks([])
    for axis in axes[::MAX_COLUMNS]:
        if len(names) <= MAX_NAMED_LABELS:
            axis.set_yticks(range(len(names)), names, fontsize=8)
        else:
            axis.set_ylabel(f"{len(names)} labels")
    figure.colorbar(image, ax=axes, label="share of the client's rows")
    figure.savefig(path, dpi=130)


def plot_divergence(
    divergence: np.ndarray | Mapping[str, np.ndarray],
    path: str | os.PathLike[str],
    client_ids: Sequence[str] | None = None,
    quantity: str = "Jensen-Shannon divergence (bits)",
) -> None:
    """
    Draws how much every two clients differ, as a heat map that is symmetric.

    The colours always go from 0 to 1, so that pictures of several partitions compare. Several matrices stand side by
    side (figure 2 of FedNLP: one an α). More than 30 clients are ordered by their mean over all others, the highest
    first, each matrix on its own. A single matrix of up to 10 clients also shows its numbers.

    Args:
        divergence (`np.ndarray` of shape `(num_clients, num_clients)` or `Mapping[str, np.ndarray]`):
            The matrix of [`jensen_shannon_divergence`], or several by the name of their setting. Any other matrix
            between 0 and 1 can be drawn too, such as that of [`vocabulary_overlap`].
        path (`str`):
            The PNG file to write.
        client_ids (`Sequence[str]`, *optional*):
            The clients' names; their numbers by default.
        quantity (`str`, *optional*, defaults to `"Jensen-Shannon divergence (bits)"`):
            What the numbers are, for the scale of colours.

    Raises:
        ValueError: If there is nothing to draw, a matrix is not square, has values outside 0 to 1, or there are not as
            many names as clients.
        ImportError: If matplotlib is not installed.

    Example:

    ```python
    >>> import os, tempfile
    >>> import numpy as np
    >>> from hf_federated.data import jensen_shannon_divergence, plot_divergence

    >>> rng = np.random.default_rng(0)
    >>> matrices = {
    ...     f"α = {alpha}": jensen_shannon_divergence(rng.dirichlet(np.full(20, alpha / 20), size=100))
    ...     for alpha in (1, 5, 10, 100)
    ... }
    >>> path = os.path.join(tempfile.mkdtemp(), "divergence.png")
    >>> plot_divergence(matrices, path)
    >>> os.path.exists(path)
    True

    ```
    """
    settings = _settings(divergence, "plot_divergence")
    for setting, matrix in settings.items():
        _check_matrix(matrix, setting, client_ids)
    named = max(len(matrix) for matrix in settings.values()) <= MAX_NAMED_CLIENTS
    side, names = 5.0 if len(settings) == 1 else 3.0, 1.4 if named else 0.4  # inches
    figure, axes = _panels(len(settings), side + names, side + names, extra_width=1.0)
    for axis, (setting, matrix) in zip(axes, settings.items(), strict=True):
        if len(matrix) > MAX_NAMED_CLIENTS:
            order = np.argsort(-matrix.sum(axis=1), kind="stable")
            matrix = matrix[np.ix_(order, order)]
            axis.set_xlabel(f"{len(matrix)} clients, highest mean first")
            axis.set_xticks([])
            axis.set_yticks([])
        else:
            ids = [str(number) for number in range(len(matrix))] if client_ids is None else client_ids
            _name_clients(axis.xaxis, ids, rotation=90)
            _name_clients(axis.yaxis, ids)
        image = _draw_matrix(axis, matrix, 1.0, aspect="equal")
        axis.set_title(shown_name(setting), fontsize=10)
        if len(settings) == 1 and len(matrix) <= MAX_WRITTEN_CLIENTS:
            for row, column in np.ndindex(matrix.shape):
                value = matrix[row, column]
                color = "black" if value > 0.6 else "white"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, ax=axes, label=quantity)
    figure.savefig(path, dpi=130, bbox_inches="tight")  # square axes leave room at two sides


def plot_sizes(
    sizes: Sequence[int] | np.ndarray | Mapping[str, Sequence[int] | np.ndarray], path: str | os.PathLike[str]
) -> None:
    """
    Draws how many rows clients have: which share of the clients has at most so many.

    Up to 30 clients are a point each. For more a histogram stands above (figure 8 of FedNLP: one line a β). The axis
    is logarithmic if the largest client has more than 20 times the rows of the smallest.

    Args:
        sizes (`Sequence[int]` or `Mapping[str, Sequence[int]]`):
            Rows of each client, such as `list(clients.num_rows.values())`, or several by the name of their setting, up
            to seven.
        path (`str`):
            The PNG file to write.

    Raises:
        ValueError: If there is nothing to draw, a client has no rows, or there are more settings than colours.
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
    settings = {name: _ascending(values, name) for name, values in _settings(sizes, "plot_sizes").items()}
    if len(settings) > len(COLORS):
        raise ValueError(f"plot_sizes: {len(settings)} settings, but there are colours for {len(COLORS)}. Draw fewer.")
    require_matplotlib()
    from matplotlib.ticker import MaxNLocator

    smallest, largest = (int(bound([bound(values) for values in settings.values()])) for bound in (min, max))
    logarithmic = largest > LOG_RATIO * smallest
    many_clients = max(map(len, settings.values())) > MAX_NAMED_CLIENTS
    if many_clients:
        figure, (histogram, axis) = new_figure(7, 5, nrows=2, sharex=True, height_ratios=(2, 3))
        bounds = (np.geomspace if logarithmic else np.linspace)(smallest, largest + 1, 31)
        edges = np.unique(np.round(bounds)) - 0.5  # no bin between two whole numbers
        _draw_histogram(histogram, settings, edges.tolist())
    else:
        figure, axis = new_figure(7, 3.6)
    for color, (setting, values) in zip(COLORS, settings.items(), strict=False):
        label = f"{shown_name(setting) or 'clients'}: {values[0]} to {values[-1]}, median {np.median(values):g}"
        reached = np.arange(1, len(values) + 1) / len(values)
        axis.step([values[0], *values], [0, *reached], where="post", color=color, linewidth=1.5, label=label)
        if len(values) <= MAX_NAMED_CLIENTS:
            axis.plot(values, reached, "o", color=color, markersize=5, clip_on=False)
    if logarithmic:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    else:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if smallest == largest:
            axis.set_xlim(smallest - 2, largest + 2)
    axis.set_ylim(0, 1.02)
    axis.set_xlabel("rows of a client")
    axis.set_ylabel("share with at most so many")
    axis.grid(color="#dddddd", linewidth=0.8)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _ascending(sizes: Iterable[int], setting: str) -> np.ndarray:
    values = np.asarray(sizes)
    if values.ndim != 1 or len(values) == 0 or values.dtype.kind not in "iu" or values.min() < 1:
        where = f" of {setting!r}" if setting else ""
        raise ValueError(
            f"plot_sizes needs a whole number of rows from 1 for each client, the sizes{where} are not. Those of a"
            " FederatedDataset are list(clients.num_rows.values())."
        )
    return np.sort(values)


def _draw_histogram(axis: Axes, settings: Mapping[str, np.ndarray], edges: list[float]) -> None:
    for color, values in zip(COLORS, settings.values(), strict=False):
        weights = np.full(len(values), 1 / len(values))
        axis.hist(values, edges, weights=weights, histtype="stepfilled", color=color, alpha=0.25)
        axis.hist(values, edges, weights=weights, histtype="step", color=color, linewidth=1.5)
    axis.set_ylabel("share of clients")


Setting = TypeVar("Setting")


def _settings(one_or_several: Setting | Mapping[str, Setting], function: str) -> dict[str, Setting]:
    """The partitions to draw by the title of each, which is empty for a single one."""
    if not isinstance(one_or_several, Mapping):
        return {"": one_or_several}
    if not one_or_several:
        raise ValueError(f"{function}: the mapping of settings is empty, so there is nothing to draw.")
    return {str(name): value for name, value in one_or_several.items()}


def _check_matrix(matrix: np.ndarray, setting: str, client_ids: Sequence[str] | None) -> None:
    where = f" of {setting!r}" if setting else ""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"plot_divergence: the matrix{where} has the shape {matrix.shape}, which is not square.")
    if not (matrix.min() >= 0 and matrix.max() <= 1):
        raise ValueError(
            f"plot_divergence: the matrix{where} has values from {matrix.min():g} to {matrix.max():g}, but the colours"
            " go from 0 to 1."
        )
    if client_ids is not None and len(client_ids) != len(matrix):
        raise ValueError(f"plot_divergence: {len(client_ids)} names for the {len(matrix)} clients{where}.")


def _panels(number: int, width: float, height: float, extra_width: float) -> tuple[Figure, list[Axes]]:
    """A row of axes, or several rows; `extra_width` is that of names and colour bar."""
    columns = min(number, MAX_COLUMNS)
    rows = -(-number // columns)
    figure, axes = new_figure(columns * width + extra_width, rows * height, nrows=rows, ncols=columns, squeeze=False)
    figure.set_layout_engine("compressed")
    for unused in axes.flat[number:]:
        unused.remove()
    return figure, list(axes.flat[:number])


def _name_clients(axis: Axis, client_ids: Sequence[str], rotation: int = 0) -> None:
    names = [shown_name(name) for name in client_ids]
    axis.set_ticks(range(len(names)), names, fontsize=8, rotation=rotation)


def _draw_matrix(axis: Axes, values: np.ndarray, largest: float, aspect: Literal["equal", "auto"]) -> AxesImage:
    return axis.imshow(values, aspect=aspect, cmap="viridis", vmin=0, vmax=largest, interpolation="nearest")


def _draw_heat_map(figure: Figure, axis: Axes, shares: np.ndarray, names: Sequence[str]) -> None:
    image = _draw_matrix(axis, shares.T, float(shares.max()), aspect="auto")
    axis.set_yticks(range(len(names)), names)
    figure.colorbar(image, ax=axis, label="share of the client's rows")
