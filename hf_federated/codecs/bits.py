"""Masks of zeros and ones, packed into the bits of bytes."""

from __future__ import annotations

import torch


def pack_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """
    Pack an attention mask into bits.

    Args:
        attention_mask (`torch.Tensor`): Shape `(batch, width)`, non-zero for tokens.

    Returns:
        `torch.Tensor`: Shape `(batch, ceil(width / 8))`, uint8. The first position is the highest bit.
    """
    batch, width = attention_mask.shape
    bits = torch.zeros(batch, -(-width // 8) * 8, dtype=torch.uint8)
    bits[:, :width] = (attention_mask != 0).cpu()
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8)
    return (bits.view(batch, -1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_mask(bits: torch.Tensor, width: int) -> torch.Tensor:
    """
    Unpack a mask that `pack_mask` packed.

    Args:
        bits (`torch.Tensor`): Shape `(batch, ceil(width / 8))`, uint8.
        width (`int`): Number of positions.

    Returns:
        `torch.Tensor`: Shape `(batch, width)`, int64, zeros and ones.
    """
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8)
    return ((bits.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :width].long()
