"""Distillation losses against their formulas, and the form of teacher that each loss expects."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from hf_federated.distillation import kl_divergence, mean_absolute_error, mean_squared_error, soft_cross_entropy


def logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


STUDENT, TEACHER = logits(0, 7, 5), logits(1, 7, 5)
WITH_LOGITS = [kl_divergence, mean_absolute_error, mean_squared_error]
LOSSES = [*WITH_LOGITS, soft_cross_entropy]


@pytest.mark.parametrize("temperature", [1, 2, 4, 2.5])
def test_kl_divergence_is_torchs_batch_mean_times_the_squared_temperature(temperature):
    log_student, log_teacher = ((z / temperature).log_softmax(-1) for z in (STUDENT, TEACHER))
    expected = temperature**2 * F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    torch.testing.assert_close(kl_divergence(STUDENT, TEACHER, temperature), expected, rtol=0, atol=1e-12)


def test_kl_divergence_is_zero_for_logits_that_differ_by_a_constant_per_row():
    assert abs(kl_divergence(STUDENT, STUDENT, 2.0).item()) < 1e-14
    assert abs(kl_divergence(STUDENT, STUDENT + torch.arange(7.0).unsqueeze(1), 2.0).item()) < 1e-14


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf])
def test_invalid_temperature_is_rejected(temperature):
    with pytest.raises(ValueError, match="`temperature` is .* must be positive"):
        kl_divergence(STUDENT, TEACHER, temperature)


def test_kl_divergence_approaches_the_centred_squared_error_at_high_temperature():
    difference = (STUDENT - STUDENT.mean(1, keepdim=True)) - (TEACHER - TEACHER.mean(1, keepdim=True))
    expected = (difference.square().sum(1) / (2 * STUDENT.shape[1])).mean()
    assert kl_divergence(STUDENT, TEACHER, 1000).item() == pytest.approx(expected.item(), rel=0.01)
    assert mean_squared_error(STUDENT, TEACHER, center=True).item() / 2 == pytest.approx(expected.item(), rel=1e-12)


def test_soft_cross_entropy_is_kl_divergence_plus_teacher_entropy():
    teacher = TEACHER.softmax(-1)
    torch.testing.assert_close(soft_cross_entropy(STUDENT, teacher), F.cross_entropy(STUDENT, teacher))
    entropy = -(teacher * teacher.log()).sum(1).mean()
    torch.testing.assert_close(soft_cross_entropy(STUDENT, teacher), kl_divergence(STUDENT, TEACHER) + entropy)


def test_squared_and_absolute_errors_are_means_over_rows_and_classes():
    torch.testing.assert_close(mean_squared_error(STUDENT, TEACHER), F.mse_loss(STUDENT, TEACHER))
    torch.testing.assert_close(mean_absolute_error(STUDENT, TEACHER), F.l1_loss(STUDENT, TEACHER))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_average_over_all_leading_dimensions(loss):
    flat = loss(STUDENT[:6], TEACHER[:6].softmax(-1))
    torch.testing.assert_close(loss(STUDENT[:6].view(2, 3, 5), TEACHER[:6].softmax(-1).view(2, 3, 5)), flat)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [(1, 5), (7, 1), (7, 4), (5,)])
def test_losses_do_not_broadcast_shapes(loss, shape):
    with pytest.raises(ValueError, match=r"shape \(7, 5\)"):
        loss(STUDENT, torch.ones(shape))


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_is_smallest_for_a_student_equal_to_the_teacher(loss):
    """With a teacher in the other form (logits or probabilities), this student would not be a stationary point."""
    teacher = TEACHER if loss in WITH_LOGITS else TEACHER.softmax(-1)
    best = TEACHER.clone().requires_grad_()
    value = loss(best, teacher)
    (gradient,) = torch.autograd.grad(value, best)
    assert gradient.abs().max() < 1e-12
    assert loss(TEACHER + 0.1 * STUDENT, teacher) > value


@pytest.mark.parametrize("loss", LOSSES)
def test_detached_teacher_gets_no_gradient(loss):
    student, source = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    loss(student, source.softmax(-1).detach()).backward()
    assert source.grad is None and student.grad.abs().sum() > 0
    loss(student, source.softmax(-1)).backward()
    assert source.grad is not None


def test_masked_teacher_class_gives_finite_losses_and_gradients():
    masked = TEACHER.clone()
    masked[:, 2] = -torch.inf
    student = STUDENT.clone().requires_grad_()
    for value in (kl_divergence(student, masked), soft_cross_entropy(student, masked.softmax(-1))):
        (gradient,) = torch.autograd.grad(value, student)
        assert value.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_losses_are_computed_in_float32(loss):
    student, teacher = (logits(seed, 3, 200, dtype=torch.bfloat16) for seed in (2, 3))
    teacher = teacher.softmax(-1)
    result = loss(student, teacher)
    assert result.dtype == torch.float32
    expected = loss(student.double(), teacher.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=0)
