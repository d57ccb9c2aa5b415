"""A fast check for NaN and infinite values."""

from __future__ import annotations

import math

import torch


def is_finite(values: torch.Tensor) -> bool:
    """
    Whether all values are finite.

    A sum with NaN or an infinite value is not finite, so a finite sum needs no further check, which would take ten
    times as long. The sum of finite values may overflow. Then each value is checked.

    Args:
        values (`torch.Tensor`): Tensor of any shape and of a floating-point dtype, on any device.
    """
    if values.element_size() == 1:  # torch has no sum of 8-bit floats
        values = values.float()
    return math.isfinite(values.sum()) or bool(values.isfinite().all())
