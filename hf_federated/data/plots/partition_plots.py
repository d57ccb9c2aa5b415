"""PNG plots of a partition: labels and divergence. They need matplotlib (extra `plots`).

The functions draw one partition, or a mapping from setting name to partition. Several partitions are drawn side by
side on the same scale. Up to 30 clients are labeled with their names and keep their order. More clients are sorted and
not labeled, and the axis label states their number. `size_plots.py` plots the sizes of clients, and `text_plots.py`
their words.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..statistics.label_statistics import LabelCounts
from .matplotlib_helpers import COLORS, MAX_NAMED_CLIENTS, display_name, new_figure, to_settings


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# With more labels, bars would have too many colors to distinguish. A heat map is drawn instead.
MAX_BAR_LABELS = len(COLORS)
# With more labels, their names do not fit next to the axis.
MAX_NAMED_LABELS = 60
# With more clients, the values do not fit into the cells of a matrix.
MAX_CLIENTS_WITH_VALUES = 10
MAX_COLUMNS = 4


def plot_partition(
    label_counts: Mapping[str, Sequence[int]],
    path: str | os.PathLike[str],
    label_names: Sequence[str] | None = None,
) -> None:
    """
    Plot the number of examples of each label for each client.

    Up to 30 clients are drawn as stacked bars with their names. More clients are drawn as stacked label shares, above
    their sizes. With more than seven labels, a heat map of label shares is drawn instead. Clients are sorted by their
    share of the first label, or by their most frequent label in a heat map.

    Args:
        label_counts (`Mapping[str, Sequence[int]]`):
            Client id to its number of examples of each label.
        path (`str`):
            Path of the PNG file to write.
        label_names (`Sequence[str]`, *optional*):
            Label names. Defaults to the label numbers.

    Raises:
        ValueError: If there is no client, or the clients have different numbers of labels.
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
        raise ValueError("plot_partition needs at least one client, and the same number of counts for each client.")
    counts = np.array(list(label_counts.values()), dtype=np.int64)  # (clients, labels)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    numbers = [str(number) for number in range(counts.shape[1])]
    names = [display_name(name) for name in (numbers if label_names is None else label_names)]
    many_labels, many_clients = len(names) > MAX_BAR_LABELS, len(counts) > MAX_NAMED_CLIENTS
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)) if many_labels else (-shares[:, 0],))
    counts, shares, ids = counts[order], shares[order], [list(label_counts)[position] for position in order]
    width = 9 if many_clients else 4.5 + 0.22 * len(ids)
    if many_labels:
        figure, axes = new_figure(width, 2.5 + 0.2 * len(names), squeeze=False)
        _draw_heat_map(figure, axes[0, 0], shares, names)
    elif many_clients:
        figure, axes = new_figure(width, 5, nrows=2, sharex=True, squeeze=False, height_ratios=(3, 1))
        _draw_bars(axes[0, 0], shares, names, 1.0, "share of examples")
        _draw_bars(axes[1, 0], counts.sum(axis=1, keepdims=True), None, 1.0, "examples")
    else:
        figure, axes = new_figure(width, 4, squeeze=False)
        _draw_bars(axes[0, 0], counts, names, 0.8, "examples")
    if many_clients:
        axes[-1, 0].set_xlabel(
            f"{len(ids)} clients, sorted by {'most frequent label' if many_labels else f'share of {names[0]!r}'}"
        )
    else:
        _name_clients(axes[0, 0].xaxis, ids, rotation=90)
    rows = counts.sum(axis=1)
    axes[0, 0].set_title(
        f"{rows.sum()} examples of {len(ids)} clients, {rows.min()} to {rows.max()}, median {np.median(rows):g}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)


def _draw_bars(axis: Axes, heights: np.ndarray, names: Sequence[str] | None, width: float, quantity: str) -> None:
    """Draw one stacked bar per row of `heights`. Without names, draw a single gray bar per row."""
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
    Plot the label shares of each client as a heat map, one column per client.

    Several partitions are drawn side by side with one color scale, from 0 to the largest share (figure 3 of FedNLP).
    More than 30 clients are sorted by their most frequent label.

    Args:
        counts ([`LabelCounts`] or `Mapping[str, LabelCounts]`):
            The counts returned by [`label_counts`], or a mapping from setting name to counts with the same labels.
        path (`str`):
            Path of the PNG file to write.

    Raises:
        ValueError: If the mapping is empty, or the partitions have different labels.
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
    settings = to_settings(counts, "plot_label_shares")
    label_names = next(iter(settings.values())).label_names
    for setting, labels in settings.items():
        if labels.label_names != label_names:
            raise ValueError(
                f"plot_label_shares: {setting!r} has the labels {labels.label_names[:10]}, but"
                f" {next(iter(settings))!r} has {label_names[:10]}. Draw partitions with different labels separately."
            )
    named = max(len(labels.client_ids) for labels in settings.values()) <= MAX_NAMED_CLIENTS
    names = [display_name(name) for name in label_names]
    height = 1.3 + (1.2 if named else 0) + min(max(0.18 * len(names), 1.6), 9.0)
    figure, axes = _create_panels(len(settings), 3.4 if len(settings) > 1 else 7.0, height, extra_width=2.2)
    largest = max(float(labels.shares.max()) for labels in settings.values())
    for axis, (setting, labels) in zip(axes, settings.items(), strict=True):
        shares, ids = labels.shares, labels.client_ids
        if len(ids) > MAX_NAMED_CLIENTS:
            shares = shares[np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))]
            axis.set_xlabel(f"{len(ids)} clients, sorted by\nmost frequent label")
        else:
            _name_clients(axis.xaxis, ids, rotation=90)
        image = _draw_matrix(axis, shares.T, largest, aspect="auto")
        axis.set_title(display_name(setting), fontsize=10)
        axis.set_yticks([])
    for axis in axes[::MAX_COLUMNS]:
        if len(names) <= MAX_NAMED_LABELS:
            axis.set_yticks(range(len(names)), names, fontsize=8)
        else:
            axis.set_ylabel(f"{len(names)} labels")
    figure.colorbar(image, ax=axes, label="share of the client's examples")
    figure.savefig(path, dpi=130)


def plot_divergence(
    divergence: np.ndarray | Mapping[str, np.ndarray],
    path: str | os.PathLike[str],
    client_ids: Sequence[str] | None = None,
    quantity: str = "Jensen-Shannon divergence (bits)",
) -> None:
    """
    Plot the differences between each pair of clients as a symmetric heat map.

    The color scale is always from 0 to 1, so that plots of different partitions can be compared. Several matrices are
    drawn side by side (figure 2 of FedNLP has one matrix per α). In each matrix, more than 30 clients are sorted by
    their mean over the other clients, with the highest mean first. A single matrix of up to 10 clients also shows its
    values.

    Args:
        divergence (`np.ndarray` of shape `(num_clients, num_clients)` or `Mapping[str, np.ndarray]`):
            The matrix returned by [`jensen_shannon_divergence`], or a mapping from setting name to matrix. The values
            of a matrix can be any values from 0 to 1, for example those of [`vocabulary_overlap`].
        path (`str`):
            Path of the PNG file to write.
        client_ids (`Sequence[str]`, *optional*):
            Client names. Defaults to the client numbers.
        quantity (`str`, *optional*, defaults to `"Jensen-Shannon divergence (bits)"`):
            Name of the plotted quantity, for the label of the color bar.

    Raises:
        ValueError: If the mapping is empty, a matrix is not square or has values outside 0 to 1, or the number of
            names is not the number of clients.
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
    settings = to_settings(divergence, "plot_divergence")
    for setting, matrix in settings.items():
        _check_matrix(matrix, setting, client_ids)
    named = max(len(matrix) for matrix in settings.values()) <= MAX_NAMED_CLIENTS
    side, names = 5.0 if len(settings) == 1 else 3.0, 1.4 if named else 0.4  # inches
    figure, axes = _create_panels(len(settings), side + names, side + names, extra_width=1.0)
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
        axis.set_title(display_name(setting), fontsize=10)
        if len(settings) == 1 and len(matrix) <= MAX_CLIENTS_WITH_VALUES:
            for row, column in np.ndindex(matrix.shape):
                value = matrix[row, column]
                color = "black" if value > 0.6 else "white"
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(image, ax=axes, label=quantity)
    figure.savefig(path, dpi=130, bbox_inches="tight")  # square axes leave empty margins


def _check_matrix(matrix: np.ndarray, setting: str, client_ids: Sequence[str] | None) -> None:
    of_setting = f" of {setting!r}" if setting else ""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(
            f"plot_divergence: the matrix{of_setting} has shape {matrix.shape}. Pass a square matrix with at least one"
            " client."
        )
    if not (matrix.min() >= 0 and matrix.max() <= 1):
        raise ValueError(
            f"plot_divergence: the matrix{of_setting} has values from {matrix.min():g} to {matrix.max():g}. All values"
            " must be from 0 to 1."
        )
    if client_ids is not None and len(client_ids) != len(matrix):
        raise ValueError(
            f"plot_divergence: got {len(client_ids)} client names, but the matrix{of_setting} has {len(matrix)}"
            " clients. Pass one name per client."
        )


def _create_panels(number: int, width: float, height: float, extra_width: float) -> tuple[Figure, list[Axes]]:
    """Create a grid of axes. `extra_width` is the width of the names and the color bar in inches."""
    columns = min(number, MAX_COLUMNS)
    rows = -(-number // columns)
    figure, axes = new_figure(columns * width + extra_width, rows * height, nrows=rows, ncols=columns, squeeze=False)
    figure.set_layout_engine("compressed")
    for unused in axes.flat[number:]:
        unused.remove()
    return figure, list(axes.flat[:number])


def _name_clients(axis: Axis, client_ids: Sequence[str], rotation: int = 0) -> None:
    names = [display_name(name) for name in client_ids]
    axis.set_ticks(range(len(names)), names, fontsize=8, rotation=rotation)


def _draw_matrix(axis: Axes, values: np.ndarray, largest: float, aspect: Literal["equal", "auto"]) -> AxesImage:
    return axis.imshow(values, aspect=aspect, cmap="viridis", vmin=0, vmax=largest, interpolation="nearest")


def _draw_heat_map(figure: Figure, axis: Axes, shares: np.ndarray, names: Sequence[str]) -> None:
    image = _draw_matrix(axis, shares.T, float(shares.max()), aspect="auto")
    axis.set_yticks(range(len(names)), names)
    figure.colorbar(image, ax=axis, label="share of the client's examples")
