"""Weights of clients' predictions: formulas, limits and rejected reports."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from hf_federated.distillation import (
    WEIGHTINGS,
    ClientReport,
    class_count_weights,
    enwc,
    rnwc,
    size,
    summarize_logits,
    uniform,
)


def reports(losses=(0.2, 0.4, 0.8), sizes=(10, 30, 60)):
    return [
        ClientReport(f"client{i}", num_examples=num_examples, min_epoch_loss=loss)
        for i, (loss, num_examples) in enumerate(zip(losses, sizes, strict=True))
    ]


def with_counts(*counts):
    return [ClientReport(f"client{i}", 1, 0.1, class_counts=row) for i, row in enumerate(counts)]


def test_size_weights_are_shares_of_the_examples():
    assert size(reports()) == {"client0": 0.1, "client1": 0.3, "client2": 0.6}


def test_uniform_weights_are_equal():
    assert list(uniform(reports()).values()) == [1 / 3] * 3


def test_rnwc_weights_are_normalized_reciprocals_of_the_losses():
    reciprocals = [1 / 0.2, 1 / 0.4, 1 / 0.8]
    expected = [value / sum(reciprocals) for value in reciprocals]
    assert expected == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-15)
    assert list(rnwc(reports()).values()) == pytest.approx(expected, abs=1e-15)


def test_enwc_weights_are_the_softmax_of_negative_losses():
    powers = [math.exp(-5 * loss) for loss in (0.2, 0.4, 0.8)]
    expected = [value / sum(powers) for value in powers]
    assert expected == pytest.approx([0.7054, 0.2595, 0.0351], abs=5e-5)
    assert list(enwc(reports()).values()) == pytest.approx(expected, abs=1e-15)


def test_enwc_with_beta_zero_is_uniform():
    assert enwc(reports(), beta=0) == uniform(reports())


def test_rnwc_gives_all_weight_to_losses_of_zero():
    assert list(rnwc(reports(losses=(0.0, 0.4, 0.0))).values()) == [0.5, 0.0, 0.5]


def test_rnwc_converges_to_its_limit_as_losses_approach_zero():
    near = list(rnwc(reports(losses=(1e-12, 0.4, 1e-12))).values())
    assert near == pytest.approx(list(rnwc(reports(losses=(0.0, 0.4, 0.0))).values()), abs=1e-11)


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
@pytest.mark.parametrize(
    "losses", [(1e4, 1e4 + 1, 2e4), (1e-320, 1.0, 1e308), (0.0, 0.0, 0.0), (5.0, 5.0, 5.0)], ids=str
)
def test_weights_are_finite_and_sum_to_one(name, losses):
    weights = list(WEIGHTINGS[name](reports(losses=losses)).values())
    assert all(math.isfinite(weight) and weight >= 0 for weight in weights)
    assert sum(weights) == pytest.approx(1, abs=1e-15)


def test_enwc_depends_on_differences_of_losses_only():
    shifted = enwc(reports(losses=(1e4, 1e4 + 0.25, 1e4 + 0.5)))
    assert shifted == pytest.approx(enwc(reports(losses=(0.0, 0.25, 0.5))), abs=1e-15)


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_single_client_has_weight_one(name):
    assert WEIGHTINGS[name](reports()[:1]) == {"client0": 1.0}


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_weights_do_not_depend_on_the_order_of_clients(name):
    client_reports = reports()
    assert WEIGHTINGS[name](client_reports[::-1]) == pytest.approx(WEIGHTINGS[name](client_reports), abs=1e-15)


@pytest.mark.parametrize("weigh", [rnwc, enwc])
@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -0.1])
def test_invalid_loss_raises_an_error_that_names_the_client(weigh, loss):
    with pytest.raises(ValueError, match=f"Client 'client1' reports a training loss of {loss}"):
        weigh(reports(losses=(0.2, loss, 0.8)))


@pytest.mark.parametrize("weigh", [*WEIGHTINGS.values(), class_count_weights])
def test_empty_cohort_is_rejected(weigh):
    with pytest.raises(ValueError, match="no clients to weigh"):
        weigh([])


@pytest.mark.parametrize("weigh", [*WEIGHTINGS.values(), class_count_weights])
def test_duplicate_client_report_is_rejected(weigh):
    twice = with_counts((1, 2)) * 2
    with pytest.raises(ValueError, match="Client 'client0' reports twice"):
        weigh(twice)


def test_size_weighting_rejects_a_client_without_examples():
    with pytest.raises(ValueError, match="Client 'client2' reports 0 examples"):
        size(reports(sizes=(1, 2, 0)))


@pytest.mark.parametrize("beta", [-1.0, float("nan"), float("inf")])
def test_invalid_beta_is_rejected(beta):
    with pytest.raises(ValueError, match="`beta` is"):
        partial(enwc, beta=beta)(reports())


# ---- Weights by class


def test_class_count_weights_are_shares_of_each_class():
    weights = class_count_weights(with_counts((1, 0, 5), (3, 2, 5)))
    expected = torch.tensor([[1 / 4, 0, 1 / 2], [3 / 4, 1, 1 / 2]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-15)


def test_class_without_examples_has_equal_weights():
    weights = class_count_weights(with_counts((1, 0), (2, 0), (3, 0)))
    assert weights[:, 1].tolist() == [1 / 3] * 3
    torch.testing.assert_close(weights.sum(0), torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ([(1, 2), None], "client1"),
        ([None, (1, 2)], "client0"),
        ([(1, 2), (1, 2, 3)], "client1"),
        ([(), ()], "client0"),
    ],
    ids=str,
)
def test_missing_or_inconsistent_class_counts_are_rejected(counts, named):
    with pytest.raises(ValueError, match=f"Client '{named}' reports `class_counts`"):
        class_count_weights(with_counts(*counts))


def test_negative_class_counts_are_rejected():
    with pytest.raises(ValueError, match=r"Client 'client1' reports `class_counts` of \(3, -1\)"):
        class_count_weights(with_counts((1, 2), (3, -1)))


# ---- Summary of logits


def test_summary_contains_mean_standard_deviation_and_entropy():
    logits = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]])
    summary = summarize_logits(logits)
    assert summary["mean_logits"] == pytest.approx((1.0, (math.log(3.0) + 2) / 2), abs=1e-7)
    assert summary["std_logits"] == pytest.approx((1.0, (2 - math.log(3.0)) / 2), abs=1e-7)
    skewed = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert summary["mean_entropy"] == pytest.approx((skewed + math.log(2)) / 2, abs=1e-7)


def test_summary_flattens_leading_dimensions():
    logits = torch.arange(12, dtype=torch.float64).reshape(2, 2, 3)
    assert summarize_logits(logits) == summarize_logits(logits.reshape(4, 3))


@pytest.mark.parametrize(
    "logits", [torch.empty(0, 3), torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, -float("inf")]])], ids=str
)
def test_empty_or_non_finite_logits_are_rejected(logits):
    with pytest.raises(ValueError, match="no row or hold NaN"):
        summarize_logits(logits)
