"""Lossy compression of the rows of a matrix: the largest values of each row.

Keeping the largest values is the operator of [Alistarh et al., 2018](https://arxiv.org/abs/1809.10505). The operator
is biased: the gradients of many tokens almost cancel in their mean, but their largest values do not. The usual remedy
is error feedback, in which the sender adds to a tensor what the compression of the previous tensor lost
([Seide et al., 2014](https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html),
[Karimireddy et al., 2019](https://arxiv.org/abs/1901.09847)). Error feedback is made for gradients of the same weights
in each step. The tensors of a split model belong to other tokens in each message, and
[Rudakov et al., 2024](https://arxiv.org/abs/2401.07788) find no gain from error feedback for them.

`keep_largest` therefore feeds back within a message: it sends the mean of what all rows lose, and the receiver adds
the mean to each row. The sum of the rows is then exact up to rounding, and no party keeps a state between messages.
`benchmarks/split_compression.py` compares the kinds of feedback.

Feedback between two epochs of the same example ([AQ-SGD, Wang et al., 2022](https://arxiv.org/abs/2206.01299)) needs
the identity of each example and as much memory as the hidden states of all examples.
"""

from __future__ import annotations

import math

import torch

from ..utils.weighted_mean import Tensors
from .bits import pack_mask, unpack_mask


# Share of the values of a row that `keep_largest` keeps.
KEPT_SHARE = 0.25


def num_kept(width: int) -> int:
    """Return the number of values of a row that `keep_largest` keeps."""
    return math.ceil(width * KEPT_SHARE)


def keep_largest(rows: torch.Tensor, with_mean: bool = False) -> dict[str, torch.Tensor]:
    """
    Keep the values of each row with the largest magnitudes, and the bits that give their places.

    Args:
        rows (`torch.Tensor` of shape `(N, C)`): Rows, float32.
        with_mean (`bool`, *optional*, defaults to `False`): Whether to add the mean of what the rows lose. Rows of
            zeros, such as the gradients of padding, do not count and stay zero.

    Returns:
        `dict[str, torch.Tensor]`: `values` of shape `(N, ceil(C · KEPT_SHARE))`, bfloat16, in the order of the row;
        `kept` of shape `(N, ceil(C / 8))`, uint8, with a set bit for each kept value; and with `with_mean`
        `mean_error` of shape `(C,)`, float32.
    """
    num_values = num_kept(rows.shape[1])
    indices = rows.abs().topk(num_values, dim=1).indices
    kept = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, indices, True)
    values = rows[kept].view(-1, num_values).to(torch.bfloat16)
    encoded = {"values": values, "kept": pack_mask(kept)}
    if with_mean:
        num_rows = (values != 0).any(dim=1).sum().clamp(min=1)
        restored = torch.zeros_like(rows).masked_scatter_(kept, values.float())
        encoded["mean_error"] = (rows - restored).sum(dim=0) / num_rows
    return encoded


def restore_largest(encoded: Tensors, width: int) -> torch.Tensor:
    """
    Restore the rows from which [`keep_largest`] kept values. The other values are zero, or the mean error.

    Args:
        encoded (`Mapping[str, torch.Tensor]`): `values`, `kept` and possibly `mean_error` from [`keep_largest`].
        width (`int`): Number of values of a row.

    Returns:
        `torch.Tensor` of shape `(N, width)`: Restored rows, float32.

    Raises:
        ValueError: If the number of set bits of a row is not the number of its values.
    """
    values, kept = encoded["values"], unpack_mask(encoded["kept"], width).bool()
    counts = kept.sum(dim=1)
    if (counts != values.shape[1]).any():
        raise ValueError(
            f"The number of set bits of a position ranges from {int(counts.min())} to {int(counts.max())}, but each "
            f"position must have {values.shape[1]} set bits, one for each sent value."
        )
    restored = torch.zeros(kept.shape).masked_scatter_(kept, values.float())
    if "mean_error" in encoded:
        restored += (values != 0).any(dim=1, keepdim=True) * encoded["mean_error"]
    return restored
