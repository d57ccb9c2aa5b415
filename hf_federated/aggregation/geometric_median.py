"""GeometricMedian (RFA): the point with the smallest sum of distances to the updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..methods import UpdateCollection
from ..utils.arguments import require
from ..utils.weighted_mean import State
from .robust import RobustAggregation
from .update_statistics import combine, gram_matrix, rounded, squared_distances


class GeometricMedian(RobustAggregation):
    """
    GeometricMedian: the point with the smallest weighted sum of distances to the updates (RFA).

    [Robust Aggregation for Federated Learning](https://arxiv.org/abs/1912.13445) (Pillutla et al., IEEE Transactions
    on Signal Processing 2022), algorithm 2, the smoothed Weiszfeld algorithm.

    An iteration computes `β_i = α_i / max(ν, ‖z − x_i‖)` and `z ← Σ_i β_i x_i / Σ_i β_i`. The median is a weighted
    mean of the updates, so all distances follow from the inner products of the changes, and an iteration does not read
    the updates again. The iterations start from weights `α_i / max(ν, median_j ‖x_i − x_j‖)` instead of `α_i`, so that
    far updates do not slow them down; the median itself does not depend on the start. `median_j` is the distance to
    the `⌊n / 2⌋`-th nearest other update.

    For LoRA modules whose factors are both trained, distances are distances of the products `B A`, computed from
    the factors. The weighted mean of the products is factored again to rank `r` by a truncated singular value
    decomposition. The scale of a LoRA module is equal for all clients; the distances leave it out.

    | paper | here |
    |---|---|
    | `α_k` | weight of an update, from `weighting` |
    | `ν` | `smoothing` |
    | `R`, number of calls of the secure average | `num_iterations` |

    Args:
        num_iterations (`int`, *optional*, defaults to `100`):
            Largest number of iterations. They end earlier if the weights no longer change.
        smoothing (`float`, *optional*, defaults to `1e-6`):
            Smallest distance `ν`.
        weighting (`str`, *optional*, defaults to `"uniform"`):
            Weight of an update: `"uniform"`, or `"examples"` or `"tokens"` as in the paper. A hostile client can
            report a large number of examples.
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, the median becomes the global state.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_kwargs (`dict`, *optional*):
            Further arguments of the server optimizer by their names in [`FedOpt`], such as `server_momentum`.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for the values of all clients that the server compares at a time, in MB.

    Raises:
        ValueError: If an argument is unknown or out of range, or if a server optimizer is combined with LoRA modules
            whose factors are both trained.

    Requirements:
        Hostile clients have less than half of the weight of a cohort. With `weighting="examples"`, a client announces
        its weight, up to `max_examples_per_client` of [`FederatedConfig`], so one client can have half of it. The
        server holds all updates of a round in a temporary file and sees every update. The paper computes the
        iterations under secure aggregation, which this class does not.

    Relations:
        - [`CoordinateMedian`] takes the median of each parameter.
        - [`Krum`] selects single updates.
        - With one or two clients of equal weight, the result is the mean.

    Example:

    ```python
    >>> from hf_federated import GeometricMedian

    >>> GeometricMedian(weighting="examples")
    GeometricMedian(weighting='examples')
    ```
    """

    name: ClassVar[str] = "geometric_median"

    def __init__(
        self,
        num_iterations: int = 100,
        smoothing: float = 1e-6,
        weighting: str = "uniform",
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
    ) -> None:
        super().__init__(server_optimizer, server_lr, server_kwargs, max_memory_mb, weighting)
        require("num_iterations", num_iterations, num_iterations >= 1, "at least 1")
        require("smoothing", smoothing, smoothing > 0, "positive")
        self.num_iterations = num_iterations
        self.smoothing = smoothing

    def estimate(self, updates: UpdateCollection) -> State:
        shares = torch.tensor(list(updates.weights.values()), dtype=torch.float64)
        weights = weiszfeld(gram_matrix(updates), shares, self.num_iterations, self.smoothing)
        return combine(updates, weights.tolist())


def weiszfeld(gram: torch.Tensor, shares: torch.Tensor, num_iterations: int, smoothing: float) -> torch.Tensor:
    """
    Weights of the points whose weighted mean is their geometric median.

    Args:
        gram (`torch.Tensor` of shape `(num_points, num_points)`, float64): Inner products of the points.
        shares (`torch.Tensor` of shape `(num_points,)`, float64): Weight of each point.
        num_iterations (`int`): Largest number of iterations.
        smoothing (`float`): Smallest distance.

    Returns:
        `torch.Tensor` of shape `(num_points,)`, float64: Weights with the sum 1.
    """
    # Points whose squares overflow are infinitely far from all others.
    finite = gram.diagonal().isfinite()
    if not finite.all():
        weights = torch.zeros_like(shares)
        weights[finite] = weiszfeld(gram[finite][:, finite], shares[finite], num_iterations, smoothing)
        return weights
    shares = _normalized(shares)
    if len(gram) == 1 or (len(gram) == 2 and shares[0] == shares[1]):
        return shares  # Every point between two points is a median. The mean is one of them.
    nearest = squared_distances(gram).sqrt().fill_diagonal_(math.inf).sort(1).values
    weights = _normalized(shares / nearest[:, len(gram) // 2 - 1].clamp(min=smoothing))
    for _ in range(num_iterations):
        product = gram @ weights
        squares = gram.diagonal() - 2 * product + weights @ product
        new = _normalized(shares / squares.clamp(min=0).sqrt().clamp(min=smoothing))
        if torch.equal(new, weights):
            break
        weights = new
    return rounded(weights)


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum()
