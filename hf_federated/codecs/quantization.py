"""Quantization of the rows of a matrix: 8-bit integers for each row, and 4-bit integers for each group of values."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from ..utils.weighted_mean import Tensors


TRAVEL_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
# Number of neighboring values that share a scale and a zero point in 4 bits.
GROUP_SIZE = 64
_STEPS = 255
_GROUP_STEPS = 15


def quantize_rows(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Quantize each row to int8 with an affine map: the integer `n` represents `zero_point + scale · (n + 128)`.

    Args:
        rows (`torch.Tensor` of shape `(N, C)`): Rows to quantize, float32.

    Returns:
        `dict[str, torch.Tensor]`: `values` of shape `(N, C)`, int8; `scale` and `zero_point` of shape `(N,)`, float32.
        The scale of a row with NaN or infinite values is NaN, so the row is NaN after [`dequantize_rows`].
    """
    low, high = rows.amin(dim=1), rows.amax(dim=1)
    scale = (high - low) / _STEPS
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    divisor = torch.where(scale > 0, scale, 1)
    steps = ((rows - low.unsqueeze(1)) / divisor.unsqueeze(1)).round().clamp(0, _STEPS)
    # The integer that replaces NaN has no effect, because the scale of its row is NaN.
    return {"values": (steps.nan_to_num() - 128).to(torch.int8), "scale": scale, "zero_point": low}


def dequantize_rows(encoded: Tensors) -> torch.Tensor:
    """
    Restore the rows that [`quantize_rows`] quantized.

    The error of each value is at most half of 1/255 of the range of its row.

    Args:
        encoded (`Mapping[str, torch.Tensor]`): `values`, `scale` and `zero_point` from [`quantize_rows`].

    Returns:
        `torch.Tensor` of shape `(N, C)`: Restored rows, float32.
    """
    return encoded["zero_point"].unsqueeze(1) + encoded["scale"].unsqueeze(1) * (encoded["values"].float() + 128)


def num_groups(width: int) -> int:
    """Return the number of groups of a row. The last group may be shorter than `GROUP_SIZE`."""
    return math.ceil(width / GROUP_SIZE)


def quantize_groups(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Quantize groups of `GROUP_SIZE` neighboring values to 4 bits: the integer `n` represents `zero_point + scale · n`.

    Args:
        rows (`torch.Tensor` of shape `(N, C)`): Rows to quantize, float32.

    Returns:
        `dict[str, torch.Tensor]`: `values` of shape `(N, ceil(C / 2))`, uint8, two integers in each byte, the first in
        the lower bits; `scale` and `zero_point` of shape `(N, ceil(C / GROUP_SIZE))`, float32. The scale of a group
        with NaN or infinite values is not finite, and the group is NaN after [`dequantize_groups`].
    """
    width = rows.shape[1]
    padding = num_groups(width) * GROUP_SIZE - width
    # The repeated last value does not change the range of the last group.
    groups = functional.pad(rows, (0, padding), mode="replicate").unflatten(1, (-1, GROUP_SIZE))  # (N, groups, size)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = (high - low) / _GROUP_STEPS
    divisor = torch.where(scale > 0, scale, 1)
    steps = ((groups - low.unsqueeze(2)) / divisor.unsqueeze(2)).round().clamp(0, _GROUP_STEPS)
    # The integer that replaces NaN has no effect, because the scale of its group is not finite.
    integers = functional.pad(steps.nan_to_num().to(torch.uint8).flatten(1)[:, :width], (0, width % 2))
    return {"values": integers[:, ::2] | integers[:, 1::2] << 4, "scale": scale, "zero_point": low}


def dequantize_groups(encoded: Tensors, width: int) -> torch.Tensor:
    """
    Restore the rows that [`quantize_groups`] quantized.

    The error of each value is at most half of 1/15 of the range of its group.

    Args:
        encoded (`Mapping[str, torch.Tensor]`): `values`, `scale` and `zero_point` from [`quantize_groups`].
        width (`int`): Number of values of a row.

    Returns:
        `torch.Tensor` of shape `(N, width)`: Restored rows, float32.
    """
    values = encoded["values"]
    integers = torch.stack((values & 15, values >> 4), dim=2).flatten(1)[:, :width].float()
    scale, zero_point = (
        encoded[name].repeat_interleave(GROUP_SIZE, dim=1)[:, :width] for name in ("scale", "zero_point")
    )
    return zero_point + scale * integers
