"""Statistics of the values of all clients that a minority of the clients moves by a limited amount only."""

from __future__ import annotations

import math

import numpy as np
import torch


def num_tolerated(num_clients: int, outlier_share: float) -> int:
    """
    Number of tolerated outliers: `min(⌈outlier_share · num_clients⌉, ⌈num_clients / 2⌉ − 1)`.

    Args:
        num_clients (`int`): Number of clients of the cohort, at least 1.
        outlier_share (`float`): Share of outliers, at least 0 and below 0.5.

    Raises:
        ValueError: If `outlier_share` is out of range.
    """
    if not 0 <= outlier_share < 0.5:
        raise ValueError(
            f"`outlier_share` is {outlier_share}; it must be at least 0 and below 0.5: no mean tolerates a majority."
        )
    return min(share_to_count(num_clients, outlier_share), (num_clients - 1) // 2)


def share_to_count(num_clients: int, share: float) -> int:
    """Return a share of the clients as a count, rounded up."""
    # Rounded before the ceiling, because 0.07 · 100 is slightly more than 7 in floating point.
    return math.ceil(round(share * num_clients, 9))


def trimmed_mean(points: torch.Tensor, num_outliers: int) -> torch.Tensor:
    """
    For each coordinate, the mean without the `num_outliers` largest and the `num_outliers` smallest values.

    If at most `num_outliers` clients are dishonest, the result is between the smallest and the largest value of the
    honest clients.

    Args:
        points (`torch.Tensor` of shape `(num_clients, ...)`): Finite float32 or float64 values, on the CPU.
        num_outliers (`int`): Number of outliers, less than half of the clients.

    Returns:
        `torch.Tensor` of shape `(...)`: The means in float64.
    """
    ordered = _sorted(points)
    center = _middle(ordered)
    kept = ordered[num_outliers : len(points) - num_outliers]
    # Computed around the median, so that clients that agree give exactly their prediction.
    return center + (kept - center).mean(0)


def median(points: torch.Tensor, num_outliers: int = 0) -> torch.Tensor:
    """
    For each coordinate, the median. For an even number of clients, it is the mean of the middle two values.

    Args:
        points (`torch.Tensor` of shape `(num_clients, ...)`): Finite float32 or float64 values, on the CPU.
        num_outliers (`int`, *optional*, defaults to `0`): Not used, because the median tolerates any minority.

    Returns:
        `torch.Tensor` of shape `(...)`: The medians in float64.
    """
    return _middle(_sorted(points))


def _sorted(points: torch.Tensor) -> torch.Tensor:
    # torch sorts columns up to ten times slower than numpy, and computes the indices too.
    return torch.from_numpy(np.sort(points.numpy(), axis=0))


def _middle(ordered: torch.Tensor) -> torch.Tensor:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle].double()
    return ordered[middle - 1].double().lerp(ordered[middle].double(), 0.5)
