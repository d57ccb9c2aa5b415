"""Quantization of sent tensors: dtypes of predictions and hidden states, and int8 per row."""

from __future__ import annotations

from collections.abc import Mapping

import torch


TRAVEL_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
_STEPS = 255


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


def dequantize_rows(encoded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """
    Restore the rows that [`quantize_rows`] quantized.

    The error of each value is at most half of 1/255 of the range of its row.

    Args:
        encoded (`Mapping[str, torch.Tensor]`): `values`, `scale` and `zero_point` from [`quantize_rows`].

    Returns:
        `torch.Tensor` of shape `(N, C)`: Restored rows, float32.
    """
    return encoded["zero_point"].unsqueeze(1) + encoded["scale"].unsqueeze(1) * (encoded["values"].float() + 128)
