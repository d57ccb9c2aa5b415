"""Gradient descent on pseudo-samples: plain steps as in the paper, and long steps for nearly the same samples."""

from __future__ import annotations

import pytest
import torch
from distillation_setup import distillation_trainer
from feddrs_runs import SMALL
from tiny import tiny_model
from torch import nn

from hf_federated.distillation.sample_descent import descend


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Counted:
    """Losses of samples `c_i |θ_i|² / 2`, which count the passes of single samples."""

    def __init__(self, curvatures):
        self.curvatures = torch.tensor(curvatures, dtype=torch.float64)
        self.passes = 0

    def __call__(self, theta, rows):
        self.passes += len(rows)
        return self.curvatures[rows] * theta.square().sum((1, 2)) / 2


CURVATURES = [0.1, 1.0, 3.0, 9.0]


def starts(number: int = 4) -> torch.Tensor:
    return torch.randn(number, 4, 2, generator=generator(), dtype=torch.float64)


def test_constant_steps_are_plain_gradient_descent():
    start, losses = starts(), Counted(CURVATURES)
    moved = descend(start, losses, num_steps=30, step_size=0.1)
    shrinking = (1 - 0.1 * losses.curvatures) ** 30  # the gradient of c θ² / 2 is c θ
    torch.testing.assert_close(moved, start * shrinking.view(-1, 1, 1))
    assert losses.passes == 4 * 30 and not moved.requires_grad


def test_constant_steps_have_the_bits_of_a_plain_loop():
    model, start = tiny_model(seed=1).eval(), torch.randn(3, 5, 16, generator=generator())
    labels = torch.tensor([0, 1, 1])

    def losses(theta, rows):
        logits = model(inputs_embeds=theta).logits
        return nn.functional.cross_entropy(logits, labels[rows], reduction="none")

    expected = start.clone()
    for _ in range(7):
        expected.requires_grad_()
        (gradient,) = torch.autograd.grad(losses(expected, torch.arange(3)).sum(), expected)
        expected = expected.detach() - 0.1 * gradient
    assert torch.equal(descend(start, losses, num_steps=7, step_size=0.1), expected)


def test_pinned_positions_stay():
    start = starts()
    moved = descend(start, Counted(CURVATURES), num_steps=3, step_size=0.1)
    pinned = descend(start, Counted(CURVATURES), num_steps=3, step_size=0.1, num_pinned=1)
    assert torch.equal(pinned[:, 0], start[:, 0]) and torch.equal(pinned[:, 1:], moved[:, 1:])


def test_growing_steps_cover_the_whole_descent_if_the_gradient_is_constant():
    passes = []

    def losses(theta, rows):
        passes.append(len(rows))
        return theta.sum((1, 2))

    start = starts()
    moved = descend(start, losses, num_steps=100, step_size=0.1, schedule="growing")
    torch.testing.assert_close(moved, start - 10.0)
    assert sum(passes) <= 4 * 9  # steps of 1, 2, 4, 8, 16, 32 and 37


@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_growing_steps_reach_the_loss_of_constant_steps_with_fewer_passes(tolerance):
    start, constant, growing = starts(), Counted(CURVATURES), Counted(CURVATURES)
    everything = torch.arange(4)
    before = constant(start, everything)
    expected = constant(descend(start, constant, 100, 0.1), everything)
    moved = descend(start, growing, 100, 0.1, tolerance=tolerance, schedule="growing")
    found = Counted(CURVATURES)(moved, everything)
    decrease = before - expected
    assert bool((found <= expected + (tolerance + 1e-3) * decrease).all())
    if tolerance:
        assert growing.passes * 5 < constant.passes


def test_steps_of_a_sample_do_not_depend_on_the_other_samples():
    start = starts()
    together = descend(start, Counted(CURVATURES), 50, 0.1, tolerance=0.05, schedule="growing")
    for row, curvature in enumerate(CURVATURES):
        alone = descend(start[row : row + 1], Counted([curvature]), 50, 0.1, tolerance=0.05, schedule="growing")
        torch.testing.assert_close(alone, together[row : row + 1], rtol=0, atol=0)


def test_sample_goes_back_if_a_long_step_raises_its_loss():
    """The loss has a valley whose far side is steep, so the fourth step would end above its start."""

    def losses(theta, rows):
        at = theta.sum((1, 2))
        return torch.where(at > 0, at, at.square() * 8)

    start = torch.ones(1, 1, 1, dtype=torch.float64)
    seen = []

    def recorded(theta, rows):
        values = losses(theta, rows)
        seen.append(float(values))
        return values

    moved = descend(start, recorded, 30, 0.1, schedule="growing")
    assert max(seen) > 1 and float(losses(moved, None)) < 0.1


def test_sample_with_a_tolerance_of_zero_stops_only_without_a_gradient():
    losses = Counted([0.0, 1.0])
    descend(starts(2), losses, 10, 0.1)
    assert losses.passes == 1 + 10


@pytest.mark.parametrize("schedule", ["constant", "growing"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_ends_and_leaves_the_other_samples(schedule, value):
    def losses(theta, rows):
        return theta.square().sum((1, 2)) * torch.where(rows == 0, value, 1.0)

    start = starts(2)
    moved = descend(start, losses, 20, 0.1, schedule=schedule)
    assert not moved[0].isfinite().all()
    alone = descend(start[1:], lambda theta, rows: theta.square().sum((1, 2)), 20, 0.1, schedule=schedule)
    torch.testing.assert_close(moved[1:], alone)


def test_no_samples_and_no_steps():
    assert descend(starts(0), Counted([]), 5, 0.1).shape == (0, 4, 2)
    start = starts()
    assert torch.equal(descend(start, Counted(CURVATURES), 0, 0.1), start)


@pytest.mark.slow
def test_feddrs_makes_nearly_the_same_samples_with_growing_steps(tmp_path):
    """The samples start equally, and their losses by the clients' models end equally, with a fifth of the passes."""
    samples, passes = {}, {}
    for schedule, tolerance in (("constant", 0.0), ("growing", 0.1)):
        kwargs = {**SMALL, "num_steps": 100, "step_size_schedule": schedule, "tolerance": tolerance}
        trainer = distillation_trainer(tmp_path / schedule, "feddrs", kwargs, federation={"num_rounds": 1})
        trainer.distillation.keeps_samples = True
        count = Counter(trainer.model)
        trainer.train()
        samples[schedule], passes[schedule] = trainer.distillation.samples, count.passes
    assert passes["growing"] * 5 < passes["constant"]
    assert samples["growing"].keys() == samples["constant"].keys()
    for client_id, constant in samples["constant"].items():
        growing = samples["growing"][client_id]
        assert torch.equal(growing["starts"], constant["starts"]) and torch.equal(
            growing["labels"], constant["labels"]
        )
        losses = [
            float(nn.functional.cross_entropy(part["logits"], part["labels"].flatten()))
            for part in (constant, growing)
        ]
        assert losses[1] == pytest.approx(losses[0], abs=0.005), client_id


class Counter:
    """Counts the samples that a model receives as embeddings."""

    def __init__(self, model):
        self.passes = 0
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        if kwargs.get("inputs_embeds") is not None:
            self.passes += len(kwargs["inputs_embeds"])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"step_size_schedule": "falling"}, "`step_size_schedule` is 'falling'"),
        ({"tolerance": -0.1}, "`tolerance` is -0.1"),
        ({"tolerance": float("nan")}, "`tolerance` is nan"),
    ],
)
def test_settings_of_the_descent_are_checked(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        distillation_trainer(tmp_path, "feddrs", {**SMALL, **kwargs})
