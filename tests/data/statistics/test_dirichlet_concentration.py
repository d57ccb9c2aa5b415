"""The effective α equals an independent reference implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import gammaln

from hf_federated.data import estimate_alpha


def draw_counts(alpha: float, num_clients: int, size: int, prior: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.multinomial(size, q) for q in rng.dirichlet(alpha * prior, num_clients)])


def log_likelihood(alpha: float, counts: np.ndarray, prior: np.ndarray) -> float:
    """Log-likelihood of the Dirichlet-multinomial distribution, without the terms that do not depend on alpha."""
    sizes = counts.sum(axis=1)
    client_terms = gammaln(alpha) - gammaln(alpha + sizes)
    return float(client_terms.sum() + (gammaln(alpha * prior + counts) - gammaln(alpha * prior)).sum())


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0, 400.0])
def test_estimated_alpha_maximizes_the_likelihood_computed_with_scipy(alpha):
    prior = np.array([0.5, 0.2, 0.2, 0.1])
    counts = draw_counts(alpha, num_clients=80, size=60, prior=prior)
    for assumed in (prior, None):
        mean = counts.sum(axis=0) / counts.sum() if assumed is None else assumed
        maximum = minimize_scalar(
            lambda log_alpha, mean=mean: -log_likelihood(math.exp(log_alpha), counts, mean),
            bounds=(-8, 12),
            method="bounded",
            options={"xatol": 1e-10},
        )
        assert math.log(estimate_alpha(counts, assumed)) == pytest.approx(maximum.x, abs=1e-4)


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0, 100.0])
def test_estimated_alpha_is_within_ten_percent_of_the_true_alpha(alpha):
    counts = draw_counts(alpha, num_clients=1000, size=200, prior=np.full(10, 0.1))
    assert estimate_alpha(counts) == pytest.approx(alpha, rel=0.1)


def test_small_clients_do_not_lower_the_estimated_alpha():
    # With 5 rows per client, the label shares are far from the distributions that the labels are drawn from.
    counts = draw_counts(2.0, num_clients=4000, size=5, prior=np.full(4, 0.25))
    assert estimate_alpha(counts) == pytest.approx(2.0, rel=0.1)


def test_random_assignment_gives_large_or_infinite_alpha():
    rng = np.random.default_rng(0)
    prior = np.full(5, 0.2)
    estimates = [estimate_alpha(rng.multinomial(100, prior, size=50), prior) for _ in range(40)]
    assert min(estimates) > 300
    # The likelihood has a finite maximum for about half of these draws.
    assert 8 <= sum(map(math.isinf, estimates)) <= 32
    assert estimate_alpha(np.full((6, 3), 40)) == math.inf  # clients are more similar than by chance


def test_alpha_is_infinite_only_if_the_likelihood_has_no_maximum():
    rng = np.random.default_rng(1)
    prior = np.full(3, 1 / 3)
    for _ in range(30):
        counts = rng.multinomial(40, prior, size=8)
        increases = log_likelihood(1e6, counts, prior) > log_likelihood(1e5, counts, prior)
        estimate = estimate_alpha(counts, prior)
        assert math.isinf(estimate) == increases or 1e5 < estimate < 1e7


def test_alpha_is_zero_if_every_client_has_one_label():
    assert estimate_alpha(np.diag([5, 9, 3])) == 0.0


def test_order_of_clients_and_labels_and_absent_labels_do_not_change_alpha():
    counts = draw_counts(1.0, num_clients=30, size=40, prior=np.array([0.6, 0.3, 0.1]))
    expected = estimate_alpha(counts)
    padded = np.concatenate([counts[::-1, ::-1], np.zeros((30, 2), dtype=np.int64)], axis=1)
    assert estimate_alpha(padded) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("counts", "prior", "message"),
    [
        ([[3, 1]], None, "at least two clients"),
        ([[3, 0], [2, 0]], None, "at least two labels"),
        ([[1, 0], [0, 1]], None, "no client has two rows"),
        ([[3, 1], [0, -2]], None, "integer counts of at least 0"),
        ([[0.5, 0.5], [0.1, 0.9]], None, "Pass LabelCounts.counts, not shares"),
        ([[3, 1], [0, 2]], [1.0, 0.0], "the prior of label 1 is 0, but 3 rows have this label"),
        ([[3, 1], [0, 2]], [1.0, 1.0], "sum to 1, got 2 numbers that sum to 2"),
        ([[3, 1], [0, 2]], [0.2, 0.3, 0.5], "must be 2 shares"),
    ],
)
def test_invalid_counts_or_prior_raise_error(counts, prior, message):
    with pytest.raises(ValueError, match=message):
        estimate_alpha(np.array(counts), None if prior is None else np.array(prior))
