"""A fast check for NaN and infinite values."""

from __future__ import annotations

import math

import torch


# The dtype in which to add values. Torch cannot add 8-bit floats, and sums of float16 values overflow.
SUM_DTYPES = {
    dtype: torch.float64 if dtype is torch.float64 else torch.float32
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point
}


def is_finite(values: torch.Tensor) -> bool:
    """
    Whether all values are finite.

    A sum with NaN or an infinite value is not finite, so a finite sum needs no further check, which would take ten
    times as long. The sum of finite values may overflow. Then each value is checked.

    Args:
        values (`torch.Tensor`): Tensor of any shape and of a floating-point dtype, on any device.
    """
    dtype = SUM_DTYPES[values.dtype]
    return math.isfinite(values.sum(dtype=dtype)) or bool(values.to(dtype).isfinite().all())
