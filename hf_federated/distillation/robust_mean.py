"""Means of clients' predictions that a minority of arbitrary clients cannot carry away, for Cronus.

Chang et al., Cronus: Robust and Heterogeneous Collaborative Learning with Black-Box Knowledge Transfer (2019,
arXiv:1912.11279), average predictions with the filter of Diakonikolas et al., Being Robust (in High Dimensions) Can Be
Practical (ICML 2017): outliers that move the mean stretch the covariance, so whoever lies far out along its top
eigenvector is removed. Two simpler estimators stand beside it, the trimmed mean and the median of each coordinate (Yin
et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018).

Each row is averaged by itself, so a client may be removed in some rows and kept in others. Clients are not weighed by
size: that would give an arbitrary client a say in how many of them it is. Against a majority no mean helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


# Eigenvalues that differ by less than this share are one: rounding must not choose between clients.
TIE = 1e-9


def robust_mean(predictions: torch.Tensor, method: str = "filter", outlier_share: float = 0.2) -> torch.Tensor:
    """
    One prediction per row from those of all clients.

    With `f` the number of outliers tolerated, `⌈outlier_share · num_clients⌉` but always less than half of the clients
    (so one of three, and none of two, whose mean is taken):

    - `"filter"`: see [`filtered_mean`]. A mean of the clients' points, so distributions stay distributions.
    - `"trimmed"`: of each coordinate the mean without the `f` largest and the `f` smallest values.
    - `"median"`: of each coordinate the median (of an even number the mean of the middle two), whatever `f` is.

    The latter two work on each coordinate by itself: of distributions they make numbers that need not sum to 1.
    Clients that agree give exactly their prediction, and the order of clients changes not one bit.

    Args:
        predictions (`torch.Tensor` of shape `(num_clients, num_rows, num_classes)`):
            Logits or probabilities, floating.
        method (`str`, *optional*, defaults to `"filter"`): A name of `ROBUST_MEANS`.
        outlier_share (`float`, *optional*, defaults to `0.2`): Share of clients that may be arbitrary, below one half.
            0 makes `"filter"` and `"trimmed"` the plain mean.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_classes)`, of the dtype and on the device of `predictions`. Computed in
        float64 on the CPU.

    Raises:
        ValueError: If the shape is another, there is no client, a value is NaN or infinite (the client's place and the
            row are named), or an argument is unknown or out of range.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.distillation import robust_mean

    >>> predictions = torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]], [[0.5, 0.5]], [[0.25, 0.75]], [[1e6, -1e6]]])
    >>> predictions.mean(0)
    tensor([[ 200000.2969, -199999.5000]])
    >>> robust_mean(predictions, "trimmed")
    tensor([[0.4167, 0.5833]])
    >>> robust_mean(predictions)
    tensor([[0.3750, 0.6250]])
    ```
    """
    if method not in ROBUST_MEANS:
        raise ValueError(f"`method` is {method!r}; allowed are {', '.join(map(repr, ROBUST_MEANS))}.")
    if predictions.ndim != 3 or not predictions.is_floating_point() or not len(predictions):
        raise ValueError(
            f"`predictions` are {predictions.dtype} of shape {tuple(predictions.shape)}; they must be floating, of "
            "shape (num_clients, num_rows, num_classes), of at least one client."
        )
    points = predictions.detach().to("cpu", torch.float64)
    finite = points.isfinite().all(-1)
    if not finite.all():
        client, row = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"The predictions of client number {client} (from 0) hold NaN or infinite values in row {row}; leave the "
            "client out."
        )
    mean = ROBUST_MEANS[method](points, num_tolerated(len(points), outlier_share))
    # Rounding may lead out of the clients' range by a last bit, and a probability below 0 has no logarithm.
    mean = mean.clamp(points.amin(0), points.amax(0))
    return mean.to(predictions.device, predictions.dtype)


def num_tolerated(num_clients: int, outlier_share: float) -> int:
    """
    How many arbitrary clients a robust mean is set for: `min(⌈outlier_share · num_clients⌉, ⌈num_clients / 2⌉ − 1)`.

    Args:
        num_clients (`int`): Of the cohort, at least 1.
        outlier_share (`float`): At least 0, below 0.5.

    Raises:
        ValueError: If `outlier_share` is out of range.
    """
    if not 0 <= outlier_share < 0.5:
        raise ValueError(
            f"`outlier_share` is {outlier_share}; it must be at least 0 and below 0.5, as no mean survives a majority."
        )
    # Rounded first, since 0.07 · 100 is a little more than 7.
    return min(math.ceil(round(outlier_share * num_clients, 9)), (num_clients - 1) // 2)


def filtered_mean(points: torch.Tensor, num_outliers: int) -> torch.Tensor:
    """
    The filter of Diakonikolas et al. on each row, in its deterministic form with weights.

    All clients start with weight 1. While they differ, each `w_i` becomes `w_i · (1 − τ_i / max_j τ_j)`, where
    `τ_i = (v · (x_i − μ_w))²` is the squared distance from the weighted mean along the top eigenvector `v` of the
    weighted covariance (over the whole eigenspace, if clients are spread alike in several directions). The weights
    before the first step that would bring the weight taken away above `2f` give the mean `μ_w`.

    The authors' code for bounded second moments instead draws a random threshold and stops once the top eigenvalue is
    below 9 times the honest clients' variance. Here that variance is not known, so the stop follows from `f` alone: a
    cohort without outliers loses weight too, from those farthest out.

    What is assumed: at most `f` of the `K` clients are arbitrary, `ε = f / K < 1/2`, and the others' predictions have
    mean `μ` and a covariance whose top eigenvalue is `σ²`. Then, whatever the arbitrary ones send, with `c = 1 − 2ε`

    `‖μ_w − μ‖₂ ≤ σ · √(2ε / c) · (1 + √(2 / c) + 1 / c)`.

    Why: as long as the unnormalized top eigenvalue `Σ_i w_i τ_i / K` is above `2σ² (1 − ε) / c`, a step takes at least
    as much weight from arbitrary clients as from honest ones. Arbitrary ones have `f` to lose, so no more than `2f` is
    gone by the time it is not above; and it never grows again. Where a covariance is small, what is left of the
    arbitrary clients cannot be far away.

    Args:
        points (`torch.Tensor` of shape `(num_clients, num_rows, num_classes)`, float64): Finite.
        num_outliers (`int`): `f`, less than half of the clients.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_classes)`, float64.
    """
    # Eigenvectors and sums depend on the order of clients in their last bits, so it must not be that of arrival.
    order = sorted(range(len(points)), key=lambda client: points[client].numpy().tobytes())
    center = median(points)
    # (num_rows, num_clients, num_classes). Around a point among the honest ones, small differences keep their digits.
    offsets = (points[order] - center).transpose(0, 1)
    weights = torch.ones(offsets.shape[:2], dtype=points.dtype)
    rows = torch.arange(len(offsets))
    # Every step takes all the weight of at least one client, so there are fewer steps than clients.
    for _ in range(len(points)):
        scores = _outlier_scores(offsets[rows], weights[rows])
        reduced = weights[rows] * (1 - scores)
        goes_on = (scores.amax(1) > 0) & (len(points) - reduced.sum(1) <= 2 * num_outliers)
        rows = rows[goes_on]
        if not len(rows):
            break
        weights[rows] = reduced[goes_on]
    return center + _weighted_mean(offsets, weights)


def _outlier_scores(points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    `τ_i / max_j τ_j` of each row; 0 for clients without weight, and for all clients of a row where they agree.

    Args:
        points (`torch.Tensor` of shape `(num_rows, num_clients, num_classes)`): What clients predict.
        weights (`torch.Tensor` of shape `(num_rows, num_clients)`): Not all 0 in any row.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_clients)`, between 0 and 1.
    """
    smallest = torch.finfo(points.dtype).tiny
    deviations = (points - _weighted_mean(points, weights)[:, None]) * (weights > 0)[..., None]
    # Squares of large numbers overflow, those of small ones vanish.
    deviations = deviations / deviations.abs().amax((1, 2), keepdim=True).clamp(min=smallest)
    # Clients are few and classes may be many: the covariance has the eigenvalues of this (num_clients, num_clients)
    # matrix, and from its eigenvectors u_j follow the projections on theirs, X √w u_j / √λ_j.
    gram = deviations @ deviations.transpose(1, 2)
    roots = weights.sqrt()
    eigenvalues, eigenvectors = torch.linalg.eigh(roots[:, :, None] * gram * roots[:, None, :])
    is_top = eigenvalues >= (1 - TIE) * eigenvalues[:, -1:]
    projections = gram @ (roots[..., None] * eigenvectors)
    scores = (projections.square() * is_top[:, None, :]).sum(-1)
    return scores / scores.amax(1, keepdim=True).clamp(min=smallest)


def _weighted_mean(points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of `(num_rows, num_clients, num_classes)` over the clients, with weights `(num_rows, num_clients)`."""
    return (weights[..., None] * points).sum(1) / weights.sum(1, keepdim=True)


def trimmed_mean(points: torch.Tensor, num_outliers: int) -> torch.Tensor:
    """
    Of each coordinate the mean without the `num_outliers` largest and as many smallest values.

    It lies between the smallest and the largest value of the clients that are honest, if at most `num_outliers` are
    not.

    Args:
        points (`torch.Tensor` of shape `(num_clients, num_rows, num_classes)`, float64): Finite.
        num_outliers (`int`): Less than half of the clients.
    """
    center = median(points)
    kept = points.sort(0).values[num_outliers : len(points) - num_outliers]
    # Around the median, so that clients who agree give exactly what they say.
    return center + (kept - center).mean(0)


def median(points: torch.Tensor, num_outliers: int = 0) -> torch.Tensor:
    """
    Of each coordinate the median; of an even number the mean of the middle two.

    Args:
        points (`torch.Tensor` of shape `(num_clients, num_rows, num_classes)`, float64): Finite.
        num_outliers (`int`, *optional*, defaults to `0`): Not needed: any minority is tolerated.
    """
    middle = len(points) // 2
    ordered = points.sort(0).values
    if len(points) % 2:
        return ordered[middle]
    return ordered[middle - 1].lerp(ordered[middle], 0.5)


# From float64 points and the number of outliers tolerated to their means.
ROBUST_MEANS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "filter": filtered_mean,
    "trimmed": trimmed_mean,
    "median": median,
}
