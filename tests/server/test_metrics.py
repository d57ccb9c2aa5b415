"""Summaries of metrics over clients. Every client has the same weight."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hf_federated.server.client_metrics import RoundSummary, lower_is_better, spread_over_clients


def test_each_metric_has_mean_worst_best_and_population_standard_deviation():
    accuracies, losses = [0.5, 1.0, 0.75], [2.0, 0.1, 0.4]
    clients = {
        name: {"eval_accuracy": accuracy, "eval_loss": loss}
        for name, accuracy, loss in zip("abc", accuracies, losses, strict=True)
    }
    assert spread_over_clients(clients) == pytest.approx(
        {
            "federated/eval_accuracy_mean": np.mean(accuracies),
            "federated/eval_accuracy_worst": min(accuracies),
            "federated/eval_accuracy_best": max(accuracies),
            "federated/eval_accuracy_spread": np.std(accuracies),
            "federated/eval_loss_mean": np.mean(losses),
            "federated/eval_loss_worst": max(losses),
            "federated/eval_loss_best": min(losses),
            "federated/eval_loss_spread": np.std(losses),
        }
    )


def test_speed_entries_are_not_summarized():
    speed = dict.fromkeys(
        ["eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time", "epoch"],
        1.0,
    )
    assert set(spread_over_clients({"a": {**speed, "eval_f1": 0.5}})) == {
        f"federated/eval_f1_{kind}" for kind in ("mean", "worst", "best", "spread")
    }


def test_metric_is_summarized_over_the_clients_that_report_it():
    spread = spread_over_clients({"a": {"eval_f1": 0.2}, "b": {}, "c": {"eval_f1": 0.4}})
    assert spread["federated/eval_f1_mean"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    "name", ["train_runtime", "epoch", "eval_loss", "test_f1", "federated/eval_f1_mean", "client/b/update_norm"]
)
def test_client_cannot_replace_entries_of_the_log_of_the_server(name):
    """A `train_runtime` of 0 ended the run, and an `eval_loss` became the result in the model card."""
    counts = {"num_examples": 1, "num_tokens": 0, "num_steps": 1}
    summary = RoundSummary.from_clients({"a": {**counts, name: 0.0, "entropy": 2.0}, "b": {**counts}}, num_failed=0)
    assert summary.other_metrics == {"entropy": 2.0}


def test_name_of_a_metric_stays_in_its_line_of_the_log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    spread_over_clients({"a": {"x\nRejected: Client 'b'\x1b[31m" + "y" * 900: float("nan")}})
    (text,) = caplog.messages
    assert text.startswith(r"Client 'a', evaluation: `x\nRejected: Client") and len(text.splitlines()) == 1
    assert text.isprintable() and len(text) < 300


def test_no_clients_give_no_metrics():
    assert spread_over_clients({}) == {}


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("eval_loss", True),
        ("loss", True),
        ("eval_wer", True),
        ("eval_perplexity", True),
        ("eval_mean_squared_error", True),
    ]
    + [("eval_accuracy", False), ("eval_f1", False), ("eval_rougeL", False), ("eval_power", False), ("gloss", False)],
)
def test_direction_of_a_metric_follows_from_its_name(metric, lower):
    assert lower_is_better(metric, None, None) is lower


def test_training_arguments_set_the_direction_of_metric_for_best_model():
    assert lower_is_better("eval_distance", "distance", False) is True
    assert lower_is_better("eval_distance", "eval_distance", False) is True
    assert lower_is_better("eval_loss", "loss", True) is False
    assert lower_is_better("eval_loss", "eval_distance", False) is True  # not the metric of the arguments
    spread = spread_over_clients({"a": {"eval_distance": 1.0}, "b": {"eval_distance": 3.0}}, "distance", False)
    assert (spread["federated/eval_distance_worst"], spread["federated/eval_distance_best"]) == (3.0, 1.0)
