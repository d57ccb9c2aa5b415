"""Numbers that travel in fewer bits: the dtypes that predictions and hidden states may have, and int8 by rows."""

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
    Affine int8 of each row: the number `n` stands for `zero_point + scale · (n + 128)`.

    Args:
        rows (`torch.Tensor` of shape `(N, C)`): float32.

    Returns:
        `dict[str, torch.Tensor]`: `values` of shape `(N, C)`, int8; `scale` and `zero_point` of shape `(N,)`, float32.
        A row with a NaN or an infinity gets a NaN for its scale, and so becomes NaN again.
    """
    low, high = rows.amin(dim=1), rows.amax(dim=1)
    scale = (high - low) / _STEPS
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    divisor = torch.where(scale > 0, scale, 1)
    steps = ((rows - low.unsqueeze(1)) / divisor.unsqueeze(1)).round().clamp(0, _STEPS)
    # NaN has no integer; what stands in for it is multiplied by the row's scale, which is NaN.
    return {"values": (steps.nan_to_num() - 128).to(torch.int8), "scale": scale, "zero_point": low}


def dequantize_rows(encoded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """
    The rows that [`quantize_rows`] made smaller, each number off by at most half of 1/255 of its row's range.

    Args:
        encoded (`Mapping[str, torch.Tensor]`): `values`, `scale` and `zero_point`.

    Returns:
        `torch.Tensor` of shape `(N, C)`: float32.
    """
    return encoded["zero_point"].unsqueeze(1) + encoded["scale"].unsqueeze(1) * (encoded["values"].float() + 128)
