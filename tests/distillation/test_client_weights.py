"""What clients' predictions weigh: the formulas, their limits, and what is refused."""

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
        ClientReport(f"client{i}", num_examples=rows, min_epoch_loss=loss)
        for i, (loss, rows) in enumerate(zip(losses, sizes, strict=True))
    ]


def with_counts(*counts):
    return [ClientReport(f"client{i}", 1, 0.1, class_counts=row) for i, row in enumerate(counts)]


def test_weights_by_size_are_shares_of_the_rows():
    assert size(reports()) == {"client0": 0.1, "client1": 0.3, "client2": 0.6}


def test_uniform_weights_are_equal():
    assert list(uniform(reports()).values()) == [1 / 3] * 3


def test_rnwc_is_the_normalized_reciprocal_of_the_loss():
    reciprocals = [1 / 0.2, 1 / 0.4, 1 / 0.8]
    expected = [value / sum(reciprocals) for value in reciprocals]
    assert expected == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=1e-15)
    assert list(rnwc(reports()).values()) == pytest.approx(expected, abs=1e-15)


def test_enwc_is_the_softmax_of_the_negative_loss():
    powers = [math.exp(-5 * loss) for loss in (0.2, 0.4, 0.8)]
    expected = [value / sum(powers) for value in powers]
    assert expected == pytest.approx([0.7054, 0.2595, 0.0351], abs=5e-5)
    assert list(enwc(reports()).values()) == pytest.approx(expected, abs=1e-15)


def test_without_beta_enwc_is_uniform():
    assert enwc(reports(), beta=0) == uniform(reports())


def test_a_loss_of_zero_takes_all_the_weight_of_rnwc():
    assert list(rnwc(reports(losses=(0.0, 0.4, 0.0))).values()) == [0.5, 0.0, 0.5]


def test_rnwc_goes_to_its_limit_as_losses_go_to_zero():
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


def test_a_large_loss_changes_nothing_but_differences_for_enwc():
    shifted = enwc(reports(losses=(1e4, 1e4 + 0.25, 1e4 + 0.5)))
    assert shifted == pytest.approx(enwc(reports(losses=(0.0, 0.25, 0.5))), abs=1e-15)


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_one_client_has_all_the_weight(name):
    assert WEIGHTINGS[name](reports()[:1]) == {"client0": 1.0}


@pytest.mark.parametrize("name", sorted(WEIGHTINGS))
def test_weights_go_with_the_client_not_with_its_place(name):
    given = reports()
    assert WEIGHTINGS[name](given[::-1]) == pytest.approx(WEIGHTINGS[name](given), abs=1e-15)


@pytest.mark.parametrize("weigh", [rnwc, enwc])
@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -0.1])
def test_a_loss_that_is_no_loss_is_refused_with_its_client(weigh, loss):
    with pytest.raises(ValueError, match=f"Client 'client1' reports a training loss of {loss}"):
        weigh(reports(losses=(0.2, loss, 0.8)))


@pytest.mark.parametrize("weigh", [*WEIGHTINGS.values(), class_count_weights])
def test_an_empty_cohort_is_refused(weigh):
    with pytest.raises(ValueError, match="no clients to weigh"):
        weigh([])


@pytest.mark.parametrize("weigh", [*WEIGHTINGS.values(), class_count_weights])
def test_a_client_that_reports_twice_is_refused(weigh):
    twice = with_counts((1, 2)) * 2
    with pytest.raises(ValueError, match="Client 'client0' reports twice"):
        weigh(twice)


def test_a_client_without_rows_has_no_weight_by_size():
    with pytest.raises(ValueError, match="Client 'client2' reports 0 examples"):
        size(reports(sizes=(1, 2, 0)))


@pytest.mark.parametrize("beta", [-1.0, float("nan"), float("inf")])
def test_a_beta_that_is_no_rate_is_refused(beta):
    with pytest.raises(ValueError, match="`beta` is"):
        partial(enwc, beta=beta)(reports())


# ---- By class


def test_class_weights_are_shares_of_each_class():
    weights = class_count_weights(with_counts((1, 0, 5), (3, 2, 5)))
    expected = torch.tensor([[1 / 4, 0, 1 / 2], [3 / 4, 1, 1 / 2]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-15)


def test_a_class_that_nobody_has_is_weighted_equally():
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
def test_class_counts_must_be_there_and_agree(counts, named):
    with pytest.raises(ValueError, match=f"Client '{named}' reports `class_counts`"):
        class_count_weights(with_counts(*counts))


def test_negative_class_counts_are_refused():
    with pytest.raises(ValueError, match=r"Client 'client1' reports `class_counts` of \(3, -1\)"):
        class_count_weights(with_counts((1, 2), (3, -1)))


# ---- What is said of logits


def test_the_summary_is_mean_deviation_and_entropy():
    logits = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]])
    summary = summarize_logits(logits)
    assert summary["mean_logits"] == pytest.approx((1.0, (math.log(3.0) + 2) / 2), abs=1e-7)
    assert summary["std_logits"] == pytest.approx((1.0, (2 - math.log(3.0)) / 2), abs=1e-7)
    skewed = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert summary["mean_entropy"] == pytest.approx((skewed + math.log(2)) / 2, abs=1e-7)


def test_the_summary_takes_tokens_as_rows():
    logits = torch.arange(12, dtype=torch.float64).reshape(2, 2, 3)
    assert summarize_logits(logits) == summarize_logits(logits.reshape(4, 3))


@pytest.mark.parametrize(
    "logits", [torch.empty(0, 3), torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, -float("inf")]])], ids=str
)
def test_logits_that_cannot_be_summarized_are_refused(logits):
    with pytest.raises(ValueError, match="no row or hold NaN"):
        summarize_logits(logits)
