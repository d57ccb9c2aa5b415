"""FedExP: the step of the server against a numpy reference in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hf_federated import FedAvg, FedExP
from hf_federated.messages import ClientUpdate


NUM_ROUNDS = 4
EXAMPLES = (3, 5, 1)
# Independent changes, so some steps are larger than 1.
CHANGES = np.random.default_rng(0).normal(size=(NUM_ROUNDS, 3, 6)) * np.array([2.0, 1.5, 3.0])[:, None]
START = np.linspace(-1.0, 1.0, 6)
EPSILON = 1e-3


def tensors(x, number=0, dtype=torch.float64):
    """A state of two floating tensors and an integer tensor."""
    values = torch.tensor(x).to(dtype)
    return {"w": values[:4].reshape(2, 2), "count": torch.tensor(number), "b": values[4:]}


def vector(state):
    return np.concatenate([state["w"].double().numpy().ravel(), state["b"].double().numpy()])


def run_round(algorithm, state, changes, number=0, order=(0, 1, 2)):
    """Return the state after a round in which the clients send their changes."""
    accumulator = algorithm.accumulator(state)
    for client in order[: len(changes)]:
        sent = tensors(vector(state) + changes[client], number, state["w"].dtype)
        accumulator.add(ClientUpdate(number, str(client), sent, EXAMPLES[client], num_tokens=0, num_steps=1))
    return algorithm.aggregate(accumulator, state)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_steps_equal_the_formula_over_several_rounds(weighting):
    weights = np.ones(3) / 3 if weighting == "uniform" else np.array(EXAMPLES) / sum(EXAMPLES)
    algorithm, state, x, steps = FedExP(EPSILON, weighting), tensors(START), START.copy(), []
    for number, changes in enumerate(CHANGES):
        state = run_round(algorithm, state, changes, number)
        mean = weights @ changes
        steps.append(max(1.0, weights @ np.square(changes).sum(1) / (2 * (np.square(mean).sum() + EPSILON))))
        x = x + steps[-1] * mean
        # The server rounds the norms to 34 bits.
        np.testing.assert_allclose(vector(state), x, rtol=0, atol=1e-8)
        assert state["count"] == number
    assert max(steps) > 1.2


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(CHANGES[0, :1], id="one client"),
        pytest.param(np.repeat(CHANGES[0, :1], 3, axis=0), id="identical updates"),
        pytest.param(np.zeros((3, 6)), id="no change"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_changes_that_agree_give_the_mean(changes, dtype):
    """Σ‖Δ_i‖² / (2 M ‖Δ̄‖²) is 1/2, and 0 without a change."""
    state = tensors(START, dtype=dtype)
    new = run_round(FedExP(), state, changes)
    mean = run_round(FedAvg("uniform"), state, changes)
    assert all(torch.equal(new[name], mean[name]) and new[name].dtype == mean[name].dtype for name in state)


def test_epsilon_limits_the_step_of_changes_that_cancel():
    changes = np.array([[2.0] * 6, [-2.0] * 6])
    changes[0, 0] = 2.2  # the mean change is 0.1 in one coordinate
    for epsilon in (0.01, 1.0):
        new = run_round(FedExP(epsilon), tensors(np.zeros(6)), changes)
        step = np.square(changes).sum() / (2 * 2 * (0.1**2 + epsilon))
        np.testing.assert_allclose(vector(new), [0.1 * step, 0, 0, 0, 0, 0], rtol=1e-9, atol=1e-12)


def test_result_does_not_depend_on_the_order_of_the_updates():
    state = tensors(START, dtype=torch.float32)
    results = [
        vector(run_round(FedExP(), state, CHANGES[0], order=order)).tobytes()
        for order in itertools.permutations(range(3))
    ]
    assert len(set(results)) == 1


def test_epsilon_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="`epsilon` is 0; it must be positive"):
        FedExP(epsilon=0)
