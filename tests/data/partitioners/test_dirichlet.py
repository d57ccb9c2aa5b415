"""Tests that draws follow the Dirichlet distribution for every concentration, and that no row is lost."""

from __future__ import annotations

import numpy as np
import pytest

from hf_federated.data.partitioners.dirichlet import assign_rows, draw_shares, split_by_shares


PRIOR = np.array([0.5, 0.3, 0.15, 0.05])


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0, 500.0])
def test_draws_have_the_mean_and_variance_of_the_dirichlet_distribution(alpha):
    num_draws = 40_000
    drawn = draw_shares(np.random.default_rng(0), alpha, PRIOR, num_draws)
    variance = PRIOR * (1 - PRIOR) / (alpha + 1)  # variance of Dir(alpha * p), whose concentrations sum to alpha
    assert np.abs(drawn.mean(axis=0) - PRIOR).max() < 4 * np.sqrt(variance.max() / num_draws)
    np.testing.assert_allclose(drawn.var(axis=0), variance, rtol=0.08)


@pytest.mark.parametrize("alpha", [0.2, 3.0])
def test_draws_have_the_same_distribution_as_numpy(alpha):
    ours = draw_shares(np.random.default_rng(0), alpha, PRIOR, 20_000)
    reference = np.random.default_rng(1).dirichlet(alpha * PRIOR, 20_000)
    points = np.linspace(0.01, 0.99, 50)
    for position in range(len(PRIOR)):
        below = [np.searchsorted(np.sort(drawn[:, position]), points) / 20_000 for drawn in (ours, reference)]
        # Critical value of the Kolmogorov-Smirnov test at significance 1 in 10 000: 2.2 * sqrt(2 / n).
        assert np.abs(below[0] - below[1]).max() < 2.2 * np.sqrt(2 / 20_000)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6])
def test_tiny_alpha_gives_one_share_of_one_with_the_prior_probability(alpha):
    drawn = draw_shares(np.random.default_rng(0), alpha, PRIOR, 20_000)
    assert np.isfinite(drawn).all()
    assert (drawn.max(axis=1) > 0.999).mean() > 0.999
    chosen = np.bincount(drawn.argmax(axis=1), minlength=4) / 20_000
    assert np.abs(chosen - PRIOR).max() < 4 * np.sqrt(0.25 / 20_000)


@pytest.mark.parametrize("alpha", [1e12, 1e300, 1.7e308])
def test_huge_alpha_gives_the_prior(alpha):
    np.testing.assert_allclose(draw_shares(np.random.default_rng(0), alpha, PRIOR, 5), [PRIOR] * 5, rtol=1e-4)


def test_share_with_prior_zero_is_zero():
    drawn = draw_shares(np.random.default_rng(0), 1.0, np.array([0.0, 1.0, 0.0, 1.0]), 100)
    assert (drawn[:, [0, 2]] == 0).all()
    np.testing.assert_allclose(drawn.sum(axis=1), 1)


def test_sizes_are_differences_of_floors_of_cumulative_shares():
    shares = np.random.default_rng(0).dirichlet(np.ones(9))
    cumulated, edges = 0.0, [0]
    for share in shares:
        cumulated += share
        edges.append(int(np.floor(cumulated * 1000)))
    edges[-1] = 1000
    assert split_by_shares(shares, 1000).tolist() == [b - a for a, b in zip(edges, edges[1:], strict=False)]


def test_sizes_sum_exactly_despite_rounding_errors_of_the_shares():
    shares = np.full(10, 0.1)  # the floating-point sum is below 1, and the sum of three shares is above 0.3
    assert np.cumsum(shares)[-1] < 1
    assert split_by_shares(shares, 1000).sum() == 1000
    sizes = split_by_shares(np.array([0.7, 0.1, 0.2 + 1e-15, 0.0]), 10**15)
    assert sizes.sum() == 10**15
    assert sizes.min() >= 0


def test_each_client_gets_its_counts_and_remaining_rows_have_no_owner():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 500)
    counts = np.array([[10, 0, 5], [0, 20, 5], [30, 1, 0]])
    owners = assign_rows(generator, labels, counts)
    for client in range(3):
        assert np.bincount(labels[owners == client], minlength=3).tolist() == counts[client].tolist()
    assert (owners == -1).sum() == 500 - counts.sum()


def test_rows_of_a_label_have_equal_probability_for_a_client():
    labels = np.array([1, 0, 1, 1, 0, 1])
    counts = np.array([[0, 1], [2, 3]])
    generator = np.random.default_rng(0)
    first = np.mean([assign_rows(generator, labels, counts) == 0 for _ in range(4000)], axis=0)
    np.testing.assert_allclose(first, [0.25, 0, 0.25, 0.25, 0, 0.25], atol=4 * np.sqrt(0.19 / 4000))
