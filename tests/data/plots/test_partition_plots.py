"""Tests of the plots of a partition: any number of clients, drawn values, and error messages."""

from __future__ import annotations

import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from hf_federated.data import (
    FederatedDataset,
    LabelCounts,
    jensen_shannon_divergence,
    plot_divergence,
    plot_label_shares,
    plot_partition,
    plot_sizes,
    plot_text_map,
)
from hf_federated.data.plots import partition_plots, text_plots


def random_counts(num_clients: int, num_labels: int, seed: int = 0) -> LabelCounts:
    counts = np.random.default_rng(seed).integers(1, 9, (num_clients, num_labels))
    ids = [f"client {number} with a name that is far too long to be shown" for number in range(num_clients)]
    return LabelCounts(ids, [f"label {number} with a long name too" for number in range(num_labels)], counts)


def text_clients(num_clients: int) -> FederatedDataset:
    rng = np.random.default_rng(0)
    texts = [" ".join(f"word{number}" for number in rng.integers(0, 30, 6)) for _ in range(3 * num_clients)]
    owners = [f"client {number % num_clients}" for number in range(3 * num_clients)]
    return FederatedDataset.from_column(Dataset.from_dict({"owner": owners, "text": texts}), "owner")


def png_size(path: Path) -> tuple[int, int]:
    """Read width and height from the PNG header."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def assert_is_png(path: Path) -> None:
    width, height = png_size(path)
    assert 400 <= width <= 2200 and 250 <= height <= 2000, (width, height)


def saved_figures(monkeypatch) -> list:
    """Return a list that collects the figures saved after this call."""
    from matplotlib.figure import Figure

    figures: list = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (figures.append(self), save(self, *args, **kwargs))
    )
    return figures


@pytest.mark.parametrize(("num_clients", "num_labels"), [(1, 1), (5, 2), (5, 300), (30, 50), (500, 2), (500, 50)])
@pytest.mark.sampled(3)
def test_plot_label_shares_of_any_size(tmp_path, num_clients, num_labels):
    path = tmp_path / "labels.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns about content that does not fit
        plot_label_shares(random_counts(num_clients, num_labels), path)
    assert_is_png(path)


@pytest.mark.parametrize("num_clients", [1, 5, 30, 31, 500])
@pytest.mark.sampled(3)
def test_plot_divergence_of_any_size(tmp_path, num_clients):
    path = tmp_path / "divergence.png"
    counts = random_counts(num_clients, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_divergence(jensen_shannon_divergence(counts.shares), path, counts.client_ids)
    assert_is_png(path)


@pytest.mark.parametrize("sizes", [[7], [3, 90, 12, 5, 1], [50] * 100, [113] * 99 + [127], list(range(1, 501))])
def test_plot_sizes_of_any_number_of_clients(tmp_path, sizes):
    path = tmp_path / "sizes.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_sizes(sizes, path)
    assert_is_png(path)


@pytest.mark.parametrize("num_clients", [1, 5, 7, 8, 500])
@pytest.mark.sampled(3)
def test_plot_text_map_of_any_number_of_clients(tmp_path, num_clients):
    path = tmp_path / "words.png"
    plot_text_map(text_clients(num_clients), path)
    assert_is_png(path)


def test_several_settings_share_one_color_scale(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    matrices = {f"α = {alpha}": np.array([[0, 1 / alpha], [1 / alpha, 0]]) for alpha in (1, 5, 10, 100, 1000)}
    plot_divergence(matrices, tmp_path / "divergence.png")
    shares = {
        "few": LabelCounts(["a"], ["x", "y"], np.array([[1, 1]])),
        "all": LabelCounts(["b"], ["x", "y"], np.array([[0, 9]])),
    }
    plot_label_shares(shares, tmp_path / "labels.png")
    for figure, titles in zip(figures, (list(matrices), list(shares)), strict=True):
        panels = [axis for axis in figure.axes if axis.images and axis.get_title()]
        assert [axis.get_title() for axis in panels] == titles
        assert {axis.images[0].get_clim() for axis in panels} == {(0, 1)}


def test_up_to_30_clients_keep_their_order_and_more_are_sorted(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    for num_clients in (30, 31):
        matrix = jensen_shannon_divergence(np.random.default_rng(0).dirichlet(np.ones(3), num_clients))
        plot_divergence(matrix, tmp_path / "divergence.png")
        image = np.asarray(figures[-1].axes[0].images[0].get_array())
        means = image.mean(axis=1)
        assert np.array_equal(image, matrix) == (num_clients == 30)
        assert (np.diff(means) <= 1e-12).all() == (num_clients == 31)
        assert np.array_equal(image, image.T)
        counts = random_counts(num_clients, 3)
        plot_label_shares(counts, tmp_path / "labels.png")
        image = np.asarray(figures[-1].axes[0].images[0].get_array()).T  # (clients, labels)
        assert np.array_equal(image, counts.shares) == (num_clients == 30)
        assert (np.diff(image.argmax(axis=1)) >= 0).all() == (num_clients == 31)


def test_small_matrix_shows_its_values(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    plot_divergence(np.array([[0, 0.25], [0.25, 0]]), tmp_path / "divergence.png", ["a", "b"], quantity="overlap")
    axis, color_bar = figures[0].axes
    assert [text.get_text() for text in axis.texts] == ["0.00", "0.25", "0.25", "0.00"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["a", "b"]
    assert color_bar.get_ylabel() == "overlap"


def test_size_curve_is_the_cumulative_share_of_clients(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    plot_sizes({"β = 1": [30, 10, 20], "β = 5": [5, 5]}, tmp_path / "sizes.png")
    steps = {line.get_label(): line for line in figures[0].axes[0].lines if "median" in line.get_label()}
    assert list(steps) == ["β = 1: 10 to 30, median 20", "β = 5: 5 to 5, median 5"]
    line = steps["β = 1: 10 to 30, median 20"]
    assert line.get_xdata().tolist() == [10, 10, 20, 30]
    assert line.get_ydata() == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_size_histogram_contains_every_client(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    for sizes in (list(range(1, 101)), [5] * 60, [1] * 50 + [100_000]):
        plot_sizes(sizes, tmp_path / "sizes.png")
        outline = figures[-1].axes[0].patches[0].get_xy()  # corners of the filled step curve
        x, y = outline[:, 0], outline[:, 1]
        tops = {
            (left, top)
            for left, right, top, next_top in zip(x, x[1:], y, y[1:], strict=False)
            if right > left and top == next_top
        }
        assert sum(top for _, top in tops) == pytest.approx(1.0)


def test_text_map_legend_lists_largest_clients_and_counts_the_rest(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    clients = text_clients(9)
    plot_text_map(clients, tmp_path / "words.png")
    names = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert names == [*(f"client {number}" for number in range(6)), "3 other clients"]
    groups = {client_id: "even" if int(client_id[-1]) % 2 == 0 else "odd" for client_id in clients}
    plot_text_map(clients, tmp_path / "words.png", groups=groups)
    legend = figures[1].axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["even", "odd"]
    with pytest.raises(ValueError, match=r"1 clients have no group, for example \['client 3'\]"):
        plot_text_map(clients, tmp_path / "x.png", groups={name: "a" for name in clients if name != "client 3"})


def test_names_are_not_drawn_as_formulas(tmp_path, monkeypatch):
    figures = saved_figures(monkeypatch)
    counts = LabelCounts(["$x^$", "a\nb", "\\frac{"], ["_under", "$pos$"], np.array([[1, 2], [3, 4], [5, 6]]))
    path = tmp_path / "odd.png"
    plot_label_shares({"$\\bad$ \\": counts}, path)
    plot_divergence(np.zeros((3, 3)), path, counts.client_ids)
    plot_partition(dict(zip(counts.client_ids, counts.counts, strict=True)), path, counts.label_names)
    names = [text.get_text().strip() for text in figures[-1].axes[0].get_legend().get_texts()]
    assert names == ["\\$pos\\$", "_under"]  # matplotlib omits names that start with an underscore
    plot_sizes({"$a^$": [3, 4]}, path)
    assert_is_png(path)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda path: plot_divergence(np.zeros((2, 3)), path), r"shape \(2, 3\). Pass a square matrix"),
        (lambda path: plot_divergence({}, path), "plot_divergence: the mapping of settings is empty"),
        (lambda path: plot_divergence({"α": np.eye(2) * 2}, path), "matrix of 'α' has values from 0 to 2"),
        (lambda path: plot_divergence(np.full((2, 2), np.nan), path), "has values from nan to nan"),
        (lambda path: plot_divergence(np.eye(2), path, ["a"]), "got 1 client names, but the matrix has 2 clients"),
        (lambda path: plot_label_shares({}, path), "plot_label_shares: the mapping of settings is empty"),
        (
            lambda path: plot_label_shares({"a": random_counts(2, 2), "b": random_counts(2, 3)}, path),
            "'b' has the labels",
        ),
        (lambda path: plot_sizes([], path), "plot_sizes: the sizes must be one-dimensional integers of at least 1"),
        (
            lambda path: plot_sizes({"a": 3, "b": 5}, path),
            r"the sizes of 'a' must be .* list\(clients.num_rows.values",
        ),
        (lambda path: plot_sizes({"β = 1": [3, 0]}, path), "the sizes of 'β = 1' must be"),
        (lambda path: plot_sizes({str(number): [1] for number in range(8)}, path), "8 settings, but at most 7"),
    ],
)
def test_invalid_input_raises_error_and_writes_no_file(tmp_path, draw, message):
    path = tmp_path / "refused.png"
    with pytest.raises(ValueError, match=message):
        draw(path)
    assert not path.exists()


def test_error_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda path: plot_label_shares(random_counts(2, 2), path),
        lambda path: plot_divergence(np.zeros((2, 2)), path),
        lambda path: plot_sizes([1, 2], path),
        lambda path: plot_text_map(text_clients(2), path),
    ):
        with pytest.raises(ImportError, match=r"pip install 'hf-federated\[plots\]'"):
            draw(tmp_path / "x.png")


def test_plots_package_exports_plot_partition():
    from hf_federated.data import plots

    assert plots.plot_partition is plot_partition is partition_plots.plot_partition
    assert plot_text_map is text_plots.plot_text_map
