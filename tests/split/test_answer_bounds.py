"""The bounds of what a client of a split model receives, relative to what it has sent."""

from __future__ import annotations

import math

import pytest
import torch
from split_runs import whole_model

from hf_federated import SplitModel
from hf_federated.split.agreement import (
    MAX_GRADIENT,
    MAX_GRADIENT_RELATIVE,
    MAX_STATES,
    MAX_STATES_RELATIVE,
    AnswerBounds,
    RefusedAnswerError,
)


ONES = torch.ones(2, 7)
STATES = ONES, ONES


def largest_accepted(growth: float, num_honest: int) -> float:
    """Ratio of the last gradient that is accepted, if the gradients grow after honest ones."""
    bounds = AnswerBounds()
    for _ in range(num_honest):
        bounds.check_gradient(ONES, ONES, STATES)
    ratio = 1.0
    while True:
        try:
            bounds.check_gradient(ONES, ratio * growth * ONES, STATES)
        except RefusedAnswerError:
            return ratio
        ratio *= growth


@pytest.mark.parametrize("growth", [1.1, 2.0])
def test_bound_does_not_follow_a_gradient_that_grows_slowly(growth):
    accepted = largest_accepted(growth, num_honest=16)
    assert MAX_GRADIENT_RELATIVE / growth < accepted <= MAX_GRADIENT_RELATIVE
    # A server that is hostile from the start has the larger bound.
    assert largest_accepted(growth, num_honest=0) <= MAX_GRADIENT


@pytest.mark.parametrize("scale_of_loss", [1e-15, 1e-6, 1e6])
@pytest.mark.parametrize("scale_of_states", [1e-3, 1.0, 1e3])
def test_bound_depends_neither_on_the_scale_of_the_loss_nor_on_that_of_the_states(scale_of_loss, scale_of_states):
    """Blocks normalize their input, so gradients are inversely proportional to hidden states."""
    bounds = AnswerBounds()
    gradient, states = scale_of_loss / scale_of_states * ONES, scale_of_states * ONES
    bounds.check_gradient(gradient, 50 * gradient, (states, states))
    if scale_of_loss > 1e-12:
        with pytest.raises(RefusedAnswerError):
            bounds.check_gradient(gradient, 1e4 * gradient, (states, states))


def test_sequences_without_a_loss_have_no_gradient():
    bounds = AnswerBounds()
    bounds.check_gradient(0 * ONES, 0 * ONES, STATES)
    with pytest.raises(RefusedAnswerError, match="is inf times as large"):
        bounds.check_gradient(0 * ONES, 1e-6 * ONES, STATES)


@pytest.mark.parametrize("value", [1e8, 1e25, math.inf, math.nan])
def test_gradient_at_a_hidden_state_of_zero_is_bounded(value):
    """The embedding of the padding token can be zero."""
    states, gradient = ONES.clone(), ONES.clone()
    states[0, 0], gradient[0, 0] = 0.0, value
    bounds = AnswerBounds()
    with pytest.raises(RefusedAnswerError):
        bounds.check_gradient(ONES, gradient, (states, ONES))


def test_hidden_states_are_bounded_by_the_sent_ones_and_by_the_first_ones():
    bounds = AnswerBounds()
    bounds.check_states((ONES, 0.9 * MAX_STATES * ONES), is_training=False)
    bounds.check_states((ONES, ONES), is_training=True)
    for largest, is_training in ((MAX_STATES_RELATIVE, True), (MAX_STATES, False)):
        received = ONES.clone()
        received[1, 3] = 1.1 * largest
        with pytest.raises(RefusedAnswerError, match="`hidden` of an answer of kind 'split_hidden' is 1.1e"):
            bounds.check_states((ONES, received), is_training)


def test_model_in_one_process_is_not_checked():
    split = SplitModel.from_model(whole_model())
    assert split.boundary.bounds is None
