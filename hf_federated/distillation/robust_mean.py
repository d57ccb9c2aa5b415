"""Robust means of clients' predictions, for Cronus. A minority of arbitrary clients has limited influence on them.

Chang et al., Cronus: Robust and Heterogeneous Collaborative Learning with Black-Box Knowledge Transfer (2019,
arXiv:1912.11279), average predictions with the filter of Diakonikolas et al., Being Robust (in High Dimensions) Can Be
Practical (ICML 2017). Outliers that move the mean stretch the covariance, so the filter removes points that are far
out along its top eigenvector. The module also has two simpler estimators, the trimmed mean and the median of each
coordinate (Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018).

Each row is averaged independently, so a client may be removed in some rows and kept in others. Clients are not
weighted by size, because an arbitrary client could report any size and gain influence. No mean is robust against a
majority.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..utils.arguments import require_one_of
from ..utils.robust_statistics import median, num_tolerated, trimmed_mean


# Eigenvalues that differ by less than this share count as equal, so that rounding does not choose between clients.
TIE = 1e-9


def robust_mean(predictions: torch.Tensor, method: str = "filter", outlier_share: float = 0.2) -> torch.Tensor:
    """
    Combine the predictions of all clients into one robust prediction per row.

    `f` is the number of tolerated outliers: `⌈outlier_share · num_clients⌉`, but always less than half of the clients.
    One of three clients is tolerated. For two clients, `f` is 0 and the result is their mean.

    - `"filter"`: see [`filtered_mean`]. It is a weighted mean of the clients' points, so distributions stay
      distributions.
    - `"trimmed"`: for each coordinate, the mean without the `f` largest and the `f` smallest values.
    - `"median"`: for each coordinate, the median (for an even number, the mean of the middle two). It does not depend
      on `f`.

    `"trimmed"` and `"median"` process each coordinate independently, so the result for distributions may not sum to 1.
    If all clients agree, the result is exactly their prediction. The result does not depend on the order of the
    clients, bit for bit.

    Args:
        predictions (`torch.Tensor` of shape `(num_clients, num_rows, num_classes)`):
            Floating point logits or probabilities.
        method (`str`, *optional*, defaults to `"filter"`): A name of `ROBUST_MEANS`.
        outlier_share (`float`, *optional*, defaults to `0.2`): Share of clients that may be arbitrary, below one half.
            With 0, `"filter"` and `"trimmed"` are the plain mean.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_classes)`: The robust mean, with the dtype and device of `predictions`.
        It is computed in float64 on the CPU.

    Raises:
        ValueError: If the shape is wrong, there is no client, a value is NaN or infinite (the message names the index
            of the client and the row), or an argument is unknown or out of range.

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
    require_one_of("method", method, ROBUST_MEANS)
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
            f"The predictions of client number {client} (from 0) hold NaN or infinite values in row {row}. Leave the "
            "client out."
        )
    mean = ROBUST_MEANS[method](points, num_tolerated(len(points), outlier_share))
    # Rounding may exceed the clients' range by the last bit, and a probability below 0 has no logarithm.
    mean = mean.clamp(points.amin(0), points.amax(0))
    return mean.to(predictions.device, predictions.dtype)


def filtered_mean(points: torch.Tensor, num_outliers: int) -> torch.Tensor:
    """
    The filter of Diakonikolas et al. for each row, in its deterministic form with weights.

    All clients start with weight 1. While they differ, each `w_i` becomes `w_i · (1 − τ_i / max_j τ_j)`. Here,
    `τ_i = (v · (x_i − μ_w))²` is the squared distance from the weighted mean along the top eigenvector `v` of the
    weighted covariance. If several directions have the same spread, `τ_i` is the squared distance in the whole
    eigenspace. The filter stops before the first step after which the removed weight would exceed `2f`. The result is
    the mean `μ_w` with the weights at this point.

    The authors' code for bounded second moments draws a random threshold instead, and stops when the top eigenvalue is
    below 9 times the variance of the honest clients. Here, this variance is unknown, so the stop depends only on `f`.
    A cohort without outliers also loses weight, starting with the clients that are farthest out.

    Assumptions: at most `f` of the `K` clients are arbitrary, `ε = f / K < 1/2`, and the predictions of the honest
    clients have the mean `μ` and a covariance with the top eigenvalue `σ²`. Then, for any predictions of the arbitrary
    clients, with `c = 1 − 2ε`,

    `‖μ_w − μ‖₂ ≤ σ · √(2ε / c) · (1 + √(2 / c) + 1 / c)`.

    Reason: while the unnormalized top eigenvalue `Σ_i w_i τ_i / K` is above `2σ² (1 − ε) / c`, a step removes at least
    as much weight from arbitrary clients as from honest clients. Arbitrary clients have the weight `f` to lose, so at
    most `2f` is removed before the eigenvalue is no longer above this bound. The eigenvalue never grows again. If a
    covariance is small, the remaining arbitrary clients cannot be far away.

    Args:
        points (`torch.Tensor` of shape `(num_clients, num_rows, num_classes)`, float64): Finite points.
        num_outliers (`int`): `f`, less than half of the clients.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_classes)`, float64.
    """
    # The order of the clients changes the last bits of eigenvectors and sums, so it must not depend on their arrival.
    order = sorted(range(len(points)), key=lambda client: points[client].numpy().tobytes())
    center = median(points)
    # (num_rows, num_clients, num_classes). Differences from a point near the honest clients keep their precision.
    offsets = (points[order] - center).transpose(0, 1)
    weights = torch.ones(offsets.shape[:2], dtype=points.dtype)
    rows = torch.arange(len(offsets))
    # Every step removes all the weight of at least one client, so there are fewer steps than clients.
    for _ in range(len(points)):
        scores = _outlier_scores(offsets[rows], weights[rows])
        reduced = weights[rows] * (1 - scores)
        is_active = (scores.amax(1) > 0) & (len(points) - reduced.sum(1) <= 2 * num_outliers)
        rows = rows[is_active]
        if not len(rows):
            break
        weights[rows] = reduced[is_active]
    return center + _weighted_mean(offsets, weights)


def _outlier_scores(points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    `τ_i / max_j τ_j` of each row. It is 0 for clients without weight, and for all clients of a row if they agree.

    Args:
        points (`torch.Tensor` of shape `(num_rows, num_clients, num_classes)`): The clients' predictions.
        weights (`torch.Tensor` of shape `(num_rows, num_clients)`): Weights. In each row, at least one weight is not
            0.

    Returns:
        `torch.Tensor` of shape `(num_rows, num_clients)`: Scores between 0 and 1.
    """
    smallest = torch.finfo(points.dtype).tiny
    deviations = (points - _weighted_mean(points, weights)[:, None]) * (weights > 0)[..., None]
    # Rescaled, because squares of large numbers overflow and squares of small numbers underflow.
    deviations = deviations / deviations.abs().amax((1, 2), keepdim=True).clamp(min=smallest)
    # There are few clients and possibly many classes. This (num_clients, num_clients) matrix has the eigenvalues of
    # the covariance. Its eigenvectors u_j give the projections on those of the covariance, X √w u_j / √λ_j.
    gram = deviations @ deviations.transpose(1, 2)
    roots = weights.sqrt()
    eigenvalues, eigenvectors = torch.linalg.eigh(roots[:, :, None] * gram * roots[:, None, :])
    is_top = eigenvalues >= (1 - TIE) * eigenvalues[:, -1:]
    projections = gram @ (roots[..., None] * eigenvectors)
    scores = (projections.square() * is_top[:, None, :]).sum(-1)
    return scores / scores.amax(1, keepdim=True).clamp(min=smallest)


def _weighted_mean(points: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean of `(num_rows, num_clients, num_classes)` over the clients, with weights `(num_rows, num_clients)`."""
    return (weights[..., None] * points).sum(1) / weights.sum(1, keepdim=True)


# Each function maps float64 points and the number of tolerated outliers to the mean.
ROBUST_MEANS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "filter": filtered_mean,
    "trimmed": trimmed_mean,
    "median": median,
}
