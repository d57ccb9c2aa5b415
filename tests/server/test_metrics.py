"""Summaries of metrics over clients. Every client has the same weight."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections import Counter

import numpy as np
import pytest

from hf_federated.reporting.metric_names import lower_is_better
from hf_federated.server.client_metrics import RoundSummary, spread_over_clients


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
    assert text.startswith(r"Client 'a', evaluation: `x Rejected: Client") and len(text.splitlines()) == 1
    assert text.isprintable() and len(text) < 300


def sums_of(clients: dict[str, dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Sum what each client would send: its values times their weights, and the weights."""
    sums: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for metrics in clients.values():
        for name, value in metrics.items():
            if name in ("num_examples", "num_tokens", "num_steps", "total_flos"):
                sums[name] += value
            else:
                weight = max(metrics["num_examples"], 1.0) if name == "loss" else 1.0
                sums[name] += weight * value
                weights[name] += weight
    return dict(sums), dict(weights)


CLIENTS: dict[str, dict[str, float]] = {
    "a": {"loss": 0.7, "grad_norm": 1.3, "learning_rate": 1e-3, "total_flos": 3e9, "entropy": 0.1, "eval_loss": 9.0},
    "b": {"loss": 2.1, "grad_norm": 0.2, "learning_rate": 3e-3, "total_flos": 1e8, "entropy": 0.7, "client/x": 1.0},
    "c": {"loss": 1.9, "learning_rate": 2e-3, "reward": -0.3, "class_count_0": 3.0},
    "d": {"grad_norm": 7.7, "entropy": 1e-3},
}
COUNTS = {"a": (11, 120, 3), "b": (29, 77, 8), "c": (0, 0, 1), "d": (5, 13, 2)}
for _name, _counts in COUNTS.items():
    CLIENTS[_name].update(zip(("num_examples", "num_tokens", "num_steps"), _counts, strict=True))


@pytest.mark.parametrize("names", ["abcd", "a", "c", "d", "bd"])
def test_summary_of_sums_equals_the_summary_of_the_clients(names):
    clients = {name: CLIENTS[name] for name in names}
    expected = RoundSummary.from_clients(clients, num_failed=2)
    summary = RoundSummary.from_sums(*sums_of(clients), num_clients=len(clients), num_failed=2)
    assert summary.clients == {} and expected.clients == clients
    for item in dataclasses.fields(RoundSummary):
        if item.name != "clients":
            actual, value = getattr(summary, item.name), getattr(expected, item.name)
            assert actual == (None if value is None else pytest.approx(value, rel=1e-12, abs=0)), item.name
    # Sums of fixed-point numbers are not exactly integers.
    sums, weights = sums_of(clients)
    sums |= {name: sums[name] - 1e-7 for name in ("num_examples", "num_tokens", "num_steps")}
    rounded = RoundSummary.from_sums(sums, weights, len(clients))
    assert (rounded.num_examples, rounded.num_tokens) == (expected.num_examples, expected.num_tokens)
    assert rounded.num_steps == expected.num_steps


def test_summary_of_clients_has_the_weighted_means():
    summary = RoundSummary.from_clients(CLIENTS, num_failed=0)
    assert summary.loss == (11 * 0.7 + 29 * 2.1 + 1 * 1.9) / (11 + 29 + 1)
    assert summary.grad_norm == statistics.fmean([1.3, 0.2, 7.7])
    assert summary.learning_rate == statistics.fmean([1e-3, 3e-3, 2e-3])
    assert (summary.num_examples, summary.num_tokens, summary.num_steps, summary.total_flos) == (45, 210, 14, 3.1e9)
    assert summary.other_metrics == {"entropy": statistics.fmean([0.1, 0.7, 1e-3]), "reward": -0.3}


def test_loss_without_a_usable_value_is_nan_and_without_a_value_is_zero(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    counts = {"num_examples": 1, "num_tokens": 0, "num_steps": 1}
    bad = dict.fromkeys(("learning_rate", "loss", "entropy", "grad_norm"), float("inf"))
    summary = RoundSummary.from_clients({"a": {**bad, **counts}}, num_failed=0, round=4)
    assert np.isnan(summary.loss) and (summary.grad_norm, summary.other_metrics) == (None, {})
    (text,) = caplog.messages
    assert text.startswith("Client 'a', round 5: `entropy` is inf, `loss` is inf, `grad_norm` is inf, and 1 more.")
    assert RoundSummary.from_clients({"a": counts}, num_failed=0).loss == 0.0
    assert RoundSummary.from_sums({**counts}, {}, num_clients=1).loss == 0.0


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
