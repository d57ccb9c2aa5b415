"""Rows of bytes: the compressed values of each row of a matrix, in one tensor.

Separate tensors for scales, places and values would need a header of 60 bytes each in a message.
"""

from __future__ import annotations

import torch

from ..utils.weighted_mean import Tensors
from .largest_values import keep_largest, num_kept, restore_largest
from .quantization import dequantize_groups, dequantize_rows, num_groups, quantize_groups, quantize_rows


ROW_DTYPES = ("int8", "int4", "topk")


def columns_of(dtype: str, width: int) -> dict[str, tuple[torch.dtype, int]]:
    """
    Return the dtype and the number of values of each part of a row of bytes, in the order of the row.

    | dtype | part | dtype of the part | number of values |
    |---|---|---|---|
    | `int8` | `scale` and `zero_point` | float32 | 1 each |
    | | `values` | int8 | `width` |
    | `int4` | `scale` and `zero_point` | float32 | `ceil(width / 64)` each |
    | | `values`, two in each byte | uint8 | `ceil(width / 2)` |
    | `topk` | `values` | bfloat16 | `ceil(width / 4)` |
    | | `kept`, the bits of their places | uint8 | `ceil(width / 8)` |

    Args:
        dtype (`str`): `"int8"`, `"int4"` or `"topk"`.
        width (`int`): Number of values of a row.
    """
    if dtype == "topk":
        return {"values": (torch.bfloat16, num_kept(width)), "kept": (torch.uint8, -(-width // 8))}
    groups = (torch.float32, 1 if dtype == "int8" else num_groups(width))
    values = (torch.int8, width) if dtype == "int8" else (torch.uint8, -(-width // 2))
    return {"scale": groups, "zero_point": groups, "values": values}


def num_row_bytes(dtype: str, width: int) -> int:
    """Return the number of bytes of a row of `width` values."""
    return sum(column.itemsize * length for column, length in columns_of(dtype, width).values())


def pack_rows(dtype: str, rows: torch.Tensor, with_mean: bool = False) -> dict[str, torch.Tensor]:
    """
    Compress the rows of a matrix.

    Args:
        dtype (`str`): `"int8"`, `"int4"` or `"topk"`.
        rows (`torch.Tensor` of shape `(N, C)`): Rows, float32, on any device.
        with_mean (`bool`, *optional*, defaults to `False`): Whether `"topk"` adds the mean of what the rows lose.

    Returns:
        `dict[str, torch.Tensor]`: CPU tensors: the rows of bytes under the name of the dtype, and possibly
        `mean_error` of shape `(C,)`, float32.
    """
    if dtype == "topk":
        compressed = keep_largest(rows, with_mean)
    else:
        compressed = quantize_rows(rows) if dtype == "int8" else quantize_groups(rows)
    columns = [compressed.pop(name) for name in columns_of(dtype, rows.shape[1])]
    joined = torch.cat([column.reshape(len(rows), -1).view(torch.uint8) for column in columns], dim=1)
    return {name: values.cpu() for name, values in {dtype: joined, **compressed}.items()}


def unpack_rows(dtype: str, packed: Tensors, width: int) -> torch.Tensor:
    """
    Restore the rows that [`pack_rows`] compressed. Non-finite values of a row become NaN.

    Args:
        dtype (`str`): `"int8"`, `"int4"` or `"topk"`.
        packed (`Mapping[str, torch.Tensor]`): What `pack_rows` returned, with checked dtypes and shapes.
        width (`int`): Number of values of a row.

    Returns:
        `torch.Tensor` of shape `(N, width)`: Restored rows, float32.

    Raises:
        ValueError: If the bits of the places of `"topk"` do not fit the number of values.
    """
    columns = columns_of(dtype, width)
    parts = packed[dtype].split([column.itemsize * length for column, length in columns.values()], dim=1)
    # A copy is aligned for every dtype.
    split = {
        name: part.clone(memory_format=torch.contiguous_format).view(column)
        for (name, (column, _)), part in zip(columns.items(), parts, strict=True)
    }
    if dtype == "topk":
        return restore_largest({**packed, **split}, width)
    if dtype == "int4":
        return dequantize_groups(split, width)
    return dequantize_rows(split | {name: split[name].squeeze(1) for name in ("scale", "zero_point")})
