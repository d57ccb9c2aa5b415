"""Statistics of paired differences: intervals, p-values, visible differences, Holm's correction and a bootstrap.

The library does not require SciPy, so the distribution function of Student's t is its finite series for whole degrees
of freedom ([Abramowitz and Stegun](https://personal.math.ubc.ca/~cbm/aands/page_948.htm), 26.7.3 and 26.7.4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


# Confidence of the intervals, and probability with which a visible difference is detected.
CONFIDENCE = 0.95
POWER = 0.8
# Differences that differ by a smaller share of the largest one are equal up to rounding.
ROUNDING = 1e-9
# Number of bootstrap draws that are in memory at the same time.
DRAWS_AT_ONCE = 64


def two_sided_p(t: float, degrees_of_freedom: int) -> float:
    """
    The probability `P(|T| ≥ |t|)` of Student's distribution.

    Args:
        t (`float`): The statistic, a difference in standard errors.
        degrees_of_freedom (`int`): Number of seeds minus one, at least 1.
    """
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(degrees_of_freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees_of_freedom % 2
    term = cosine if is_odd else 1.0
    total = term if degrees_of_freedom > 1 else 0.0
    for power in range(2 + is_odd, degrees_of_freedom, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    inside = (angle + sine * total) * 2 / math.pi if is_odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


@functools.cache
def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """
    The quantile of Student's distribution.

    Args:
        probability (`float`): From 0.5 to a number below 1.
        degrees_of_freedom (`int`): At least 1.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.paired_statistics import t_quantile

    >>> [round(t_quantile(0.975, number), 3) for number in (1, 2, 4, 19)]
    [12.706, 4.303, 2.776, 2.093]

    ```
    """
    low, high = 0.0, 1.0
    while two_sided_p(high, degrees_of_freedom) > 2 * (1 - probability):
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if two_sided_p(middle, degrees_of_freedom) > 2 * (1 - probability):
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class PairedDifferences:
    """
    Differences of two runs, one for each seed, and what can be concluded about their mean.

    Args:
        values (`tuple[float, ...]`): The finite differences, positive if the first run is better. At least one.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.paired_statistics import PairedDifferences

    >>> differences = PairedDifferences((0.01, 0.02, 0.06))
    >>> round(differences.mean, 4), round(differences.standard_error, 4)
    (0.03, 0.0153)
    >>> [round(bound, 4) for bound in differences.interval]
    [-0.0357, 0.0957]
    >>> round(differences.visible, 4)
    0.0819

    ```
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or not all(map(math.isfinite, self.values)):
            raise ValueError(f"values={self.values!r}; give at least one difference, and only finite numbers.")

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return math.fsum(value / len(self.values) for value in self.values)

    @property
    def is_constant(self) -> bool:
        """Whether there are several seeds, and all have the same difference up to rounding."""
        largest = max(map(abs, self.values))
        return len(self.values) > 1 and max(self.values) - min(self.values) <= ROUNDING * largest

    @functools.cached_property
    def standard_error(self) -> float | None:
        """The sample standard deviation divided by the root of the number of seeds. `None` with one seed."""
        number = len(self.values)
        if number == 1:
            return None
        if self.is_constant:
            return 0.0
        mean = self.mean
        # `hypot` does not overflow for the perplexities of a model that diverged.
        return math.hypot(*(value - mean for value in self.values)) / math.sqrt((number - 1) * number)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean, with Student's t over seeds. `None` with one seed."""
        if self.standard_error is None:
            return None
        half = t_quantile((1 + CONFIDENCE) / 2, len(self.values) - 1) * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def visible(self) -> float | None:
        """
        The smallest difference that would have been seen: a true difference of this size is detected with a
        probability of about 80 % by a two-sided test at the level of 5 %. `None` with one seed.

        The value is `(t_0.975 + t_0.80) · standard error` with the quantiles at the number of seeds minus one. With
        many seeds the factor is `1.96 + 0.84 = 2.80`; it is 5.36 with 3 seeds, 3.72 with 5 and 2.95 with 20. The
        factor 2.80 at 3 seeds would promise 80 % and detect 35 %.
        """
        if self.standard_error is None:
            return None
        degrees = len(self.values) - 1
        return (t_quantile((1 + CONFIDENCE) / 2, degrees) + t_quantile(POWER, degrees)) * self.standard_error

    def p_value(self, margin: float = 0.0) -> float | None:
        """
        The two-sided p-value of a mean that equals the margin. `None` if the spread over seeds is unknown or zero.

        Args:
            margin (`float`, *optional*, defaults to 0.0): The margin.
        """
        if not self.standard_error:
            return None
        return two_sided_p((self.mean - margin) / self.standard_error, len(self.values) - 1)

    def p_value_of_equality(self, margin: float) -> float | None:
        """
        The p-value of the decision whether the mean is within a margin. `None` if the spread is unknown or zero.

        The value is below 0.05 if, and only if, the 95 % interval lies within the margin (two one-sided tests, [TOST](
        https://doi.org/10.1007/BF01068419), each at 2.5 %) or outside the margin.

        Args:
            margin (`float`): The positive margin.
        """
        if not self.standard_error:
            return None
        # The bound that is closer to the mean decides, and both directions are at the same distance from this bound.
        return two_sided_p((abs(self.mean) - margin) / self.standard_error, len(self.values) - 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """
    Adjust p-values for the number of tests with the [step-down procedure of Holm](https://www.jstor.org/stable/4615733).

    Args:
        p_values (`Sequence[float]`): The p-value of each test of a family.

    Returns:
        `list[float]`: The adjusted p-values. Tests with an adjusted value below 0.05 are significant, and the
        probability of one or more errors among them is at most 5 %.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.paired_statistics import holm

    >>> holm([0.25, 0.0625, 0.5])
    [0.5, 0.1875, 0.5]

    ```
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = largest
    return adjusted


def bootstrap_interval(
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    examples: Sequence[Sequence[Hashable]] | None = None,
    num_draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """
    The 95 % interval of a mean difference over test examples, from a paired bootstrap within seeds.

    Each draw takes test examples with replacement, the same examples for both runs, and averages the difference over
    the examples of a seed and over seeds. The interval is the range from the 2.5th to the 97.5th percentile of the
    draws. It describes the sampling of the test examples for the trained models, not the spread over seeds.

    Args:
        first (`Sequence[np.ndarray]`):
            For each seed, the values of the first run by test example, shape `(num_examples,)`: whether the prediction
            is correct, or the log-probability of the label.
        second (`Sequence[np.ndarray]`):
            For each seed, the values of the second run on the same test examples.
        examples (`Sequence[Sequence[Hashable]]`, *optional*):
            For each seed, the identities of the test examples, such as row hashes. An example that several seeds share
            is drawn for all of them, because its difficulty is the same. By default, each seed has other examples.
        num_draws (`int`, *optional*, defaults to 2000):
            Number of draws.
        seed (`int`, *optional*, defaults to 0):
            Seed of the draws.

    Raises:
        ValueError: If there are no seeds or examples, or the lengths differ.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.experiments.benchmark.paired_statistics import bootstrap_interval

    >>> first, second = np.array([1, 1, 1, 0] * 50), np.array([1, 0, 1, 0] * 50)
    >>> low, high = bootstrap_interval([first], [second])
    >>> 0.18 < low < 0.25 < high < 0.32
    True

    ```
    """
    if examples is None:
        examples = [[(number, position) for position in range(len(values))] for number, values in enumerate(first)]
    lengths = [[len(values) for values in group] for group in (first, second, examples)]
    if not lengths[0] or not all(lengths[0]) or not lengths[0] == lengths[1] == lengths[2]:
        raise ValueError(
            f"the numbers of examples by seed are {lengths[0]} for the first run, {lengths[1]} for the second run and"
            f" {lengths[2]} for the identities. Give the same numbers for one or more seeds, each at least 1."
        )
    numbers: dict[Hashable, int] = {}
    positions = [[numbers.setdefault(name, len(numbers)) for name in names] for names in examples]
    sums, counts = np.zeros((2, len(numbers), len(positions)))
    for column, (position, a, b) in enumerate(zip(positions, first, second, strict=True)):
        np.add.at(sums[:, column], position, np.subtract(a, b, dtype=float))
        np.add.at(counts[:, column], position, 1)
    generator = np.random.default_rng(seed)
    means = []
    for start in range(0, num_draws, DRAWS_AT_ONCE):
        shape = (min(DRAWS_AT_ONCE, num_draws - start), len(numbers))
        drawn = generator.integers(len(numbers), size=shape) + len(numbers) * np.arange(shape[0])[:, None]
        weights = np.bincount(drawn.ravel(), minlength=math.prod(shape)).reshape(shape).astype(float)
        totals = weights @ counts  # number of drawn examples by draw and seed
        with np.errstate(invalid="ignore"):  # none of the drawn examples belongs to a seed with very few examples
            means += np.nanmean(weights @ sums / totals, axis=1).tolist()
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
