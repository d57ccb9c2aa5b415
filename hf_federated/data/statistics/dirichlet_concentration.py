"""The effective Dirichlet concentration α of the labels of clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    import torch


# In float64, the likelihood of a larger concentration equals the likelihood of an infinite one.
MAX_ALPHA = 1e9


def estimate_alpha(counts: np.ndarray, prior: np.ndarray | None = None) -> float:
    """
    Estimate the Dirichlet concentration that best explains the label differences of clients, the *effective* α.

    The model is the label partition of FedNLP (Lin et al., 2022, section 3.2). The label distribution of each client
    is a draw from `Dir(alpha * prior)` with a prior that sums to 1, and the examples of the client are independent
    draws from this distribution. For a partition made with `Dir(a)` with equal `a` for each of L labels, the result is
    about `a * L`.

    The estimate maximizes the likelihood of this Dirichlet-multinomial distribution over α. Therefore the chance
    differences of clients with few examples do not lower the estimate. For a fixed prior, the likelihood has at most
    one maximum (Levin and Reeds, 1977, "Compound multinomial likelihood functions are unimodal").

    Examples that are drawn without replacement, from a dataset that runs out of a label, do not follow this model. In
    this case, the estimate describes the resulting partition, not the `alpha` argument of the partitioner.

    Args:
        counts (`np.ndarray` of shape `(num_clients, num_labels)`, integer):
            Number of examples of each client with each label: [`LabelCounts.counts`].
        prior (`np.ndarray` of shape `(num_labels,)`, *optional*):
            The mean label distribution. Defaults to the label shares of all clients together.

    Returns:
        `float`: α. `inf` if clients differ at most as much as a random assignment of the examples; the likelihood then
        increases with α without a maximum. `0.0` if every client has a single label.

    Raises:
        `ValueError`: If there is only one client or one label, if no client has two examples, or if the prior of a
            label is 0 and a client has the label.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.data import estimate_alpha
    >>> rng = np.random.default_rng(0)
    >>> counts = np.stack([rng.multinomial(100, rng.dirichlet([0.5, 0.5, 1.0])) for _ in range(2000)])
    >>> round(estimate_alpha(counts, prior=np.array([0.25, 0.25, 0.5])), 1)
    2.0

    ```
    """
    counts, prior = _check_counts(counts, prior)
    sizes = counts.sum(axis=1)
    clients, labels = np.nonzero(counts)
    present, expected = counts[clients, labels], prior[labels]
    # Twice the derivative of the likelihood by 1 / alpha at alpha = inf. If it is at most 0, no finite alpha is a
    # maximum.
    if float((present * (present - 1) / expected).sum() - (sizes * (sizes - 1)).sum()) <= 0:
        return math.inf
    if len(present) == int((sizes > 0).sum()):
        return 0.0
    import torch

    slope = _Slope(torch.from_numpy(present), torch.from_numpy(expected), torch.from_numpy(sizes))
    low = high = 0.0
    while slope(low)[0] <= 0:
        low -= 2.0
    while slope(high)[0] > 0:
        high += 2.0
        if high > math.log(MAX_ALPHA):
            return math.inf
    return math.exp(_root(slope, low, high))


@dataclass(frozen=True)
class _Slope:
    """First and second derivative of the log-likelihood with respect to log α."""

    present: torch.Tensor  # counts above 0, float64
    expected: torch.Tensor  # prior of the label of each count, float64
    sizes: torch.Tensor  # number of examples of each client, float64

    def __call__(self, log_alpha: float) -> tuple[float, float]:
        import torch

        alpha = torch.tensor(math.exp(log_alpha), dtype=torch.float64)
        scaled = alpha * self.expected
        first = (self.expected * (torch.digamma(scaled + self.present) - torch.digamma(scaled))).sum()
        first += (torch.digamma(alpha) - torch.digamma(alpha + self.sizes)).sum()
        second = (self.expected**2 * (torch.polygamma(1, scaled + self.present) - torch.polygamma(1, scaled))).sum()
        second += (torch.polygamma(1, alpha) - torch.polygamma(1, alpha + self.sizes)).sum()
        return float(alpha * first), float(alpha * first + alpha**2 * second)


def _root(slope: _Slope, low: float, high: float) -> float:
    """
    Find the point where the slope changes from positive to negative.

    Uses Newton steps, and bisection if a Newton step leaves the interval.
    """
    middle = (low + high) / 2
    for _ in range(100):
        value, curvature = slope(middle)
        low, high = (middle, high) if value > 0 else (low, middle)
        candidate = middle - value / curvature if curvature < 0 else math.nan
        if not low < candidate < high:
            candidate = (low + high) / 2
        if abs(candidate - middle) < 1e-10:
            break
        middle = candidate
    return candidate


def _check_counts(counts: np.ndarray, prior: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Check the arguments of `estimate_alpha` and return them as float64."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ValueError(
            "estimate_alpha needs integer counts of at least 0 of shape (num_clients, num_labels), got"
            f" {counts.dtype} of shape {counts.shape}. Pass LabelCounts.counts, not shares."
        )
    if len(counts) < 2:
        raise ValueError(f"estimate_alpha needs at least two clients, got {len(counts)}.")
    if int(counts.sum(axis=1).max(initial=0)) < 2:
        raise ValueError(
            "estimate_alpha: no client has two rows. One row gives no information about the label shares of a client."
        )
    counts = counts.astype(np.float64)
    pooled = counts.sum(axis=0)
    prior = pooled / pooled.sum() if prior is None else np.asarray(prior, dtype=np.float64)
    if prior.shape != pooled.shape or (prior < 0).any() or abs(float(prior.sum()) - 1) > 1e-6:
        raise ValueError(
            f"estimate_alpha: the prior must be {len(pooled)} shares of at least 0 that sum to 1, got {prior.size}"
            f" numbers that sum to {float(prior.sum()):g}."
        )
    impossible = np.flatnonzero((prior == 0) & (pooled > 0))
    if len(impossible):
        raise ValueError(
            f"estimate_alpha: the prior of label {int(impossible[0])} is 0, but {int(pooled[impossible[0]])} rows have"
            " this label. Pass a prior above 0."
        )
    if int((prior > 0).sum()) < 2:
        raise ValueError("estimate_alpha needs at least two labels with a prior above 0.")
    return counts, prior
