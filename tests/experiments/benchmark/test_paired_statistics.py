"""Intervals, p-values and corrections against SciPy, hand calculations and simulated benchmarks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from hf_federated.experiments.benchmark.paired_statistics import (
    PairedDifferences,
    bootstrap_interval,
    holm,
    t_quantile,
    two_sided_p,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 19, 99])
def test_distribution_of_student_is_that_of_scipy(degrees):
    for t in (0.0, 0.3, 1.0, 2.776, 8.0, -2.0):
        assert two_sided_p(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), abs=1e-12)
    for probability in (0.5, 0.8, 0.975, 0.999):
        assert t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), abs=1e-9)
    assert two_sided_p(math.inf, degrees) == 0


def test_interval_of_a_hand_calculation():
    # Mean 0.02, deviations -0.02, 0 and 0.02, variance 0.0008 / 2, standard error 0.02 / √3, t = 4.302653.
    differences = PairedDifferences((0.00, 0.02, 0.04))
    assert differences.mean == pytest.approx(0.02) and differences.standard_error == pytest.approx(0.011547005)
    assert differences.interval == pytest.approx((0.02 - 0.049682757, 0.02 + 0.049682757), abs=1e-8)
    # t = 0.02 / 0.011547 = √3. With two degrees of freedom, P(|T| ≥ t) = 1 − t / √(t² + 2) = 1 − √(3 / 5).
    assert differences.p_value() == pytest.approx(1 - math.sqrt(3 / 5))
    assert differences.p_value(margin=0.02) == pytest.approx(1)
    # The quantile at 80 % with two degrees of freedom is 0.6 √2 / √(1 − 0.36).
    assert differences.visible == pytest.approx((4.302653 + 1.060660) * 0.011547005, abs=1e-7)


def test_statistics_are_those_of_the_paired_t_test_of_scipy():
    values = np.random.default_rng(0).normal(0.1, 1, size=7)
    expected = stats.ttest_1samp(values, 0)
    interval = expected.confidence_interval(0.95)
    differences = PairedDifferences(tuple(values))
    assert differences.p_value() == pytest.approx(expected.pvalue)
    assert differences.interval == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("num_seeds", [5, 20])
def test_intervals_cover_the_true_difference_in_95_of_100_simulated_benchmarks(num_seeds):
    """2000 benchmarks: two runs whose scores share the difficulty of the seed."""
    generator = np.random.default_rng(num_seeds)
    true, covered = 0.01, 0
    for _ in range(2000):
        difficulty = generator.normal(0.6, 0.05, num_seeds)
        first = difficulty + true + generator.normal(0, 0.02, num_seeds)
        second = difficulty + generator.normal(0, 0.03, num_seeds)
        low, high = PairedDifferences(tuple(first - second)).interval
        covered += low < true < high
    assert 0.93 <= covered / 2000 <= 0.97


@pytest.mark.parametrize("num_seeds", [3, 5, 20])
def test_visible_difference_is_detected_in_80_of_100_simulated_benchmarks(num_seeds):
    generator = np.random.default_rng(num_seeds)
    error = 0.03 / math.sqrt(num_seeds)
    # Values with mean 0 and standard error 1 have the factor as their visible difference.
    base = np.linspace(-1, 1, num_seeds)
    factor = PairedDifferences(tuple(base / (base.std(ddof=1) / math.sqrt(num_seeds)))).visible
    samples = generator.normal(factor * error, 0.03, size=(2000, num_seeds))
    detected = [PairedDifferences(tuple(sample)).p_value() < 0.05 for sample in samples]
    assert 0.74 < np.mean(detected) < 0.88


def test_equality_is_decided_by_two_one_sided_tests():
    values = (0.001, -0.002, 0.003, 0.000)
    differences = PairedDifferences(values)
    low, high = differences.interval
    for margin in (0.002, high - 1e-9, high + 1e-9, 0.01):
        is_within = -margin < low and high < margin
        assert (differences.p_value_of_equality(margin) < 0.05) == is_within, margin
    # Two one-sided tests of SciPy at the margin 0.01. The larger p-value counts, doubled because each is at 2.5 %.
    above = stats.ttest_1samp(values, -0.01, alternative="greater").pvalue
    below = stats.ttest_1samp(values, 0.01, alternative="less").pvalue
    assert differences.p_value_of_equality(0.01) == pytest.approx(2 * max(above, below))


def test_differences_without_a_spread():
    one = PairedDifferences((0.5,))
    assert (one.standard_error, one.interval, one.visible, one.p_value()) == (None, None, None, None)
    same = PairedDifferences((0.1, 0.1, 0.1))
    assert same.is_constant and same.standard_error == 0 and same.p_value() is None
    assert same.interval == pytest.approx((0.1, 0.1))
    # Rounding of 0.3 − 0.2 and 0.2 − 0.1 is not a spread.
    assert PairedDifferences((0.3 - 0.2, 0.2 - 0.1)).is_constant


def test_large_values_do_not_overflow():
    differences = PairedDifferences((1e300, -1e300, 1e300))
    assert math.isfinite(differences.standard_error) and math.isfinite(differences.mean)


@pytest.mark.parametrize("values", [(), (math.nan,), (0.1, math.inf)])
def test_values_must_be_finite(values):
    with pytest.raises(ValueError, match="give at least one difference, and only finite numbers"):
        PairedDifferences(values)


def test_correction_of_holm():
    # Sorted: 0.01 · 4, 0.02 · 3, 0.03 · 2, 0.04 · 1. Adjusted values never decrease.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == [] and holm([0.03]) == [0.03]


def test_holm_bounds_the_probability_of_an_error():
    """In 2000 families of five true null hypotheses, 5 % have an adjusted p below 0.05."""
    generator = np.random.default_rng(1)
    errors = [min(holm(generator.uniform(size=5).tolist())) < 0.05 for _ in range(2000)]
    assert 0.035 < np.mean(errors) < 0.065


def test_bootstrap_over_examples_covers_the_true_difference():
    generator, covered, num_tries = np.random.default_rng(2), 0, 200
    for number in range(num_tries):
        first = generator.random(300) < 0.7
        second = np.where(generator.random(300) < 0.5, first, generator.random(300) < 0.6)
        true = 0.7 - (0.5 * 0.7 + 0.5 * 0.6)
        low, high = bootstrap_interval([first], [second], num_draws=300, seed=number)
        covered += low < true < high
    assert 0.9 <= covered / num_tries <= 0.99


def test_examples_that_seeds_share_are_drawn_together():
    values = [np.random.default_rng(3).random(200) for _ in range(2)]
    zeros, names = [np.zeros(200)] * 8, [range(200)] * 8
    low, high = bootstrap_interval([values[0]] * 8, zeros, names)
    # Eight equal seeds with the same examples have the interval of one seed. With other examples, it is narrower.
    one_low, one_high = bootstrap_interval(values[:1], zeros[:1])
    assert high - low == pytest.approx(one_high - one_low, rel=0.1)
    apart_low, apart_high = bootstrap_interval([values[0]] * 8, zeros)
    assert apart_high - apart_low == pytest.approx((high - low) / math.sqrt(8), rel=0.15)


def test_bootstrap_refuses_runs_with_other_examples():
    for first, second in (([], []), ([np.ones(0)], [np.ones(0)]), ([np.ones(2)], [np.ones(3)])):
        with pytest.raises(ValueError, match="the numbers of examples by seed are"):
            bootstrap_interval(first, second)
