"""Tests of the plots of a run."""

from __future__ import annotations

import doctest
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from hf_federated.reporting import run_plots
from hf_federated.reporting.learning_curves import CurvePanel, plot_learning_curves
from hf_federated.reporting.run_plots import plot_learning_curve, plot_partition


@pytest.mark.parametrize("num_clients", [1, 5, 500])
@pytest.mark.parametrize("num_labels", [2, 20])
def test_plot_partition_of_any_size(tmp_path, num_clients, num_labels):
    counts = np.random.default_rng(0).integers(0, 9, (num_clients, num_labels))
    path = tmp_path / "partition.png"
    plot_partition({f"client {number}": row for number, row in enumerate(counts)}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_partition_with_a_client_without_rows(tmp_path):
    plot_partition({"a": [0, 0], "b": [1, 2]}, tmp_path / "partition.png")


@pytest.mark.parametrize("counts", [{}, {"a": [1, 2], "b": [1]}])
def test_counts_of_different_lengths_raise_error(tmp_path, counts):
    with pytest.raises(ValueError, match="at least one client"):
        plot_partition(counts, tmp_path / "partition.png")


def test_error_for_unknown_metric_lists_logged_metrics(tmp_path):
    logs = [{"step": 1, "eval_loss": 0.5, "eval_f1": 0.4}]
    with pytest.raises(ValueError, match="'eval_accuracy' was never logged.*eval_f1, eval_loss"):
        plot_learning_curve(logs, tmp_path / "curve.png")


def test_curve_has_one_point_per_round(tmp_path):
    logs = [{"step": 1, "loss": 0.7}, {"step": 1, "eval_accuracy": 0.5}, {"step": 2, "eval_accuracy": 0.6}]
    logs.append({"step": 2, "eval_accuracy": 0.7})  # the evaluation after training logs the last round again
    assert run_plots._series(logs, "eval_accuracy") == {1: 0.5, 2: 0.7}
    plot_learning_curve(logs, tmp_path / "curve.png", references={"centralized": 0.8})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_rounds", [1, 2, 3, 7, 40])
def test_ticks_are_at_integer_rounds(tmp_path, monkeypatch, num_rounds):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: figures.append(self))
    rounds = range(1, num_rounds + 1)
    logs = [{"step": round, "loss": 1 / round, "eval_accuracy": round / 100} for round in rounds]
    plot_learning_curve(logs, tmp_path / "curve.png")
    curves = {"FedAvg": [{round: round / 100 for round in rounds}]}
    plot_learning_curves([CurvePanel("task", "accuracy", curves)], tmp_path / "curves.png")
    for axes in (axes for figure in figures for axes in figure.axes):
        first, last = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if first <= tick <= last]
        assert ticks and all(tick == round(tick) for tick in ticks), ticks


def test_error_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-federated\[plots\]'"):
        plot_partition({"a": [1]}, tmp_path / "partition.png")


def test_docstring_examples_run():
    result = doctest.testmod(run_plots)
    assert result.attempted > 0 and result.failed == 0
