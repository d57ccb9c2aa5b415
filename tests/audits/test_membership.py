"""Membership inference and canary exposure on losses with a known answer."""

from __future__ import annotations

import math

import pytest
import torch

from hf_federated.audits import CanaryExposure, Evidence, LiRA, LossThreshold, ShadowLosses


def shadows(effect: float, num_models: int = 8, num_examples: int = 60, seed: int = 0) -> ShadowLosses:
    """Draw losses of easy and hard examples. Membership lowers the loss by `effect`."""
    generator = torch.Generator().manual_seed(seed)
    members = torch.rand(num_models, num_examples, generator=generator).argsort(0) < num_models // 2
    difficulty = 1 + 3 * torch.rand(num_examples, generator=generator)
    noise = 0.1 * torch.randn(num_models, num_examples, generator=generator)
    return ShadowLosses((difficulty + noise - effect * members).clamp_min(1e-3), members)


def result(attack, effect):
    return attack.run(Evidence(None, shadows=shadows(effect)))[0]


@pytest.mark.parametrize("attack", [LossThreshold(num_resamples=200), LiRA(num_resamples=200)])
def test_random_losses_give_no_information(attack):
    found = result(attack, effect=0.0)
    low, high = found.intervals["auc"]
    assert low <= 0.5 <= high and abs(found.metrics["auc"] - 0.5) < 0.1
    assert found.metrics["tpr"] < 0.1


@pytest.mark.parametrize("attack", [LossThreshold(num_resamples=20), LiRA(num_resamples=20)])
def test_losses_of_an_overfitted_model_name_all_members(attack):
    found = result(attack, effect=1000.0)
    assert found.metrics == pytest.approx({"auc": 1.0, "tpr": 1.0})
    assert found.intervals["auc"] == pytest.approx([1.0, 1.0])


def test_lira_finds_members_that_a_common_threshold_does_not():
    """Membership lowers the loss by 0.5, and the examples differ by up to 3."""
    assert result(LossThreshold(num_resamples=20), 0.5).metrics["auc"] < 0.7
    lira = result(LiRA(num_resamples=20), 0.5)
    assert lira.metrics["auc"] > 0.95 and lira.metrics["tpr"] > 0.5


def test_likelihood_ratio_is_that_of_two_normal_distributions():
    members = torch.tensor([[True], [True], [True], [False], [False], [False]])
    losses = torch.tensor([[0.5], [0.6], [0.8], [1.0], [1.3], [1.1]])
    logits = -losses.double() - torch.log1p(-torch.exp(-losses.double()))
    inside, outside = logits[1:3, 0], logits[3:, 0]
    expected = [
        torch.distributions.Normal(part.mean(), part.std()).log_prob(logits[0, 0]) for part in (inside, outside)
    ]
    scores = LiRA().scores(ShadowLosses(losses, members))
    assert float(scores[0, 0]) == pytest.approx(float(expected[0] - expected[1]))


def test_exposure_is_largest_for_a_memorized_canary_and_small_for_an_absent_one():
    references = torch.linspace(1, 2, 7).repeat(2, 1)
    canaries = torch.tensor([[0.5, 1.9], [1.4, 0.7]])
    included = torch.tensor([[True, False], [False, True]])
    losses, members = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)
    evidence = Evidence(None, shadows=ShadowLosses(losses, members, canaries, included, references))
    (found,) = CanaryExposure().run(evidence)
    assert found.metrics["exposure"] == found.metrics["largest"] == math.log2(8)
    # The absent canaries rank behind six and behind three references.
    assert found.metrics["absent"] == pytest.approx((math.log2(8 / 7) + math.log2(8 / 4)) / 2)


def test_equal_losses_give_no_exposure():
    assert CanaryExposure.exposure(torch.ones(1), torch.ones(7)).tolist() == [0.0]


def test_attacks_without_evidence_return_no_result():
    for attack in (LossThreshold(), LiRA(), CanaryExposure()):
        assert attack.run(Evidence(None)) == []
    assert CanaryExposure().run(Evidence(None, shadows=shadows(0.0))) == []
