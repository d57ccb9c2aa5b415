"""Temperature scaling against independent minimizers, and inputs for which no temperature exists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_federated.experiments.calibration import calibrated_loss, fit_temperature, log_probabilities


def draw(num_examples=400, num_labels=5, sharpness=3.0, seed=0):
    """Logits whose softmax is the distribution of the labels, and the same logits times `sharpness`."""
    generator = np.random.default_rng(seed)
    true = generator.normal(size=(num_examples, num_labels))
    shares = np.exp(true) / np.exp(true).sum(axis=1, keepdims=True)
    labels = np.array([generator.choice(num_labels, p=row) for row in shares])
    return sharpness * true, labels


def test_log_probabilities_equal_those_of_torch():
    logits, labels = draw()
    expected = torch.log_softmax(torch.tensor(logits / 1.7), dim=-1)[torch.arange(len(labels)), torch.tensor(labels)]
    np.testing.assert_allclose(log_probabilities(logits, labels, 1.7), expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_temperature_equals_that_of_an_independent_optimizer(sharpness):
    """L-BFGS on the logarithm of the temperature, as in the code of Guo et al."""
    logits, labels = draw(sharpness=sharpness)
    log_temperature = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_temperature], max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-15, line_search_fn="strong_wolfe"
    )

    def loss():
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(torch.tensor(logits) / log_temperature.exp(), torch.tensor(labels))
        value.backward()
        return value

    optimizer.step(loss)
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(float(log_temperature.detach().exp()), rel=1e-6)
    assert temperature == pytest.approx(sharpness, rel=0.15)  # the labels are drawn at temperature `sharpness`


def test_scaled_logits_give_the_same_calibrated_loss():
    logits, labels = draw(num_examples=300)
    first, temperature = calibrated_loss(logits[:100], labels[:100], logits[100:], labels[100:])
    second, scaled = calibrated_loss(4 * logits[:100], labels[:100], 4 * logits[100:], labels[100:])
    assert second == pytest.approx(first) and scaled == pytest.approx(4 * temperature)


def test_calibration_reads_no_test_label_and_lowers_the_loss_of_an_overconfident_model():
    logits, labels = draw(num_examples=600)
    loss, temperature = calibrated_loss(logits[:300], labels[:300], logits[300:], labels[300:])
    _, unchanged = calibrated_loss(logits[:300], labels[:300], logits[300:], np.roll(labels[300:], 1))
    assert temperature == unchanged
    assert loss < -log_probabilities(logits[300:], labels[300:]).mean()


def test_separable_validation_examples_give_the_lowest_temperature_and_a_finite_loss():
    validation = np.array([[1.0, 0.0], [0.0, 1.0]])
    loss, temperature = calibrated_loss(validation, np.array([0, 1]), validation, np.array([0, 0]))
    assert temperature == 0.01 and loss == pytest.approx(0.5 * 100)  # log-probabilities 0 and -1 / 0.01


def test_a_model_below_guessing_gets_the_highest_temperature():
    assert fit_temperature(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([1, 0])) == 100
    assert fit_temperature(np.zeros((3, 2)), np.array([1, 0, 0])) == 100  # all temperatures have the same loss


def test_a_label_with_the_logit_minus_infinity_is_excluded():
    logits, labels = draw(num_labels=3)
    padded = np.concatenate([logits, np.full((len(logits), 1), -np.inf)], axis=1)
    assert fit_temperature(padded, labels) == pytest.approx(fit_temperature(logits, labels), rel=1e-12)
    np.testing.assert_array_equal(log_probabilities(padded, labels), log_probabilities(logits, labels))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_nan(bad):
    logits, labels = draw(num_examples=4)
    logits[1, 2] = bad
    assert math.isnan(fit_temperature(logits, labels))
    assert np.isnan(log_probabilities(logits, labels)).tolist() == [False, True, False, False]
    assert all(map(math.isnan, calibrated_loss(logits, labels, *draw(num_examples=3))))


def test_an_impossible_validation_label_gives_nan():
    assert math.isnan(fit_temperature(np.array([[0.0, -np.inf]]), np.array([1])))


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.empty((0, 2)), np.empty(0, dtype=int), "at least one example"),
        (np.zeros((2, 2)), np.array([0]), r"shape \(1,\)"),
        (np.zeros(2), np.array([0, 1]), r"shape \(2,\)"),
        (np.zeros((2, 2)), np.array([0, 2]), "integers from 0 to 1"),
        (np.zeros((2, 2)), np.array([-100, 0]), "from -100 to 0"),
        (np.zeros((2, 2)), np.array([0.0, 1.0]), "type float64"),
    ],
)
def test_inputs_that_do_not_match_are_refused(logits, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(logits, labels)
