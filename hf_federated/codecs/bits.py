"""Masks of zeros and ones, packed into the bits of bytes."""

from __future__ import annotations

import numpy as np
import torch


def pack_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """
    Pack an attention mask into bits.

    Args:
        attention_mask (`torch.Tensor`): Shape `(batch, width)`, non-zero for tokens.

    Returns:
        `torch.Tensor`: Shape `(batch, ceil(width / 8))`, uint8. The first position is the highest bit.
    """
    return torch.from_numpy(np.packbits((attention_mask != 0).cpu().numpy(), axis=1))


def unpack_mask(bits: torch.Tensor, width: int) -> torch.Tensor:
    """
    Unpack a mask that `pack_mask` packed.

    Args:
        bits (`torch.Tensor`): Shape `(batch, ceil(width / 8))`, uint8.
        width (`int`): Number of positions.

    Returns:
        `torch.Tensor`: Shape `(batch, width)`, int64, zeros and ones.
    """
    return torch.from_numpy(np.unpackbits(bits.cpu().numpy(), axis=1)[:, :width]).long()
