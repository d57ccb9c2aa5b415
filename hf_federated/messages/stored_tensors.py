"""The tensors of a safetensors file in memory, as views of the file.

`safetensors.torch.load` copies all tensors, so a large message would be in memory twice, and holds the interpreter's
lock until all of them are copied.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from ..utils.buffers import ALIGNMENT


METADATA_KEY = "__metadata__"
# The limit of numpy, and of most operations of torch.
MAX_DIMENSIONS = 64
# Number of bytes that move at once, because a move holds the interpreter's lock.
_MOVED_BYTES = 4 * 1024**2

# The dtypes by their names in safetensors, in the order of the tensors in the file.
DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensors(blob: bytes | memoryview, header: dict[str, Any], data: int) -> dict[str, torch.Tensor]:
    """
    Return the tensors of a safetensors file by name, as views of the file if it can be written to.

    Args:
        blob (`bytes` or `memoryview`): The file.
        header (`dict`): The header of the file.
        data (`int`): Position of the byte after the header.

    Raises:
        ValueError: If the tensors do not lie one after the other from the end of the header to the end of the file.
        KeyError: If a dtype is unknown.
        TypeError: If a field of the header has another type.
    """
    entries, position = [], data
    named = [(name, entry) for name, entry in header.items() if name != METADATA_KEY]
    for name, entry in sorted(named, key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed")
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"tensor {name!r} has the shape {shape} and the offsets {start} and {stop}")
        if data + start != position or stop - start != math.prod(shape) * dtype.itemsize or data + stop > len(blob):
            raise ValueError(f"tensor {name!r} has {stop - start} bytes from byte {start}")
        entries.append((name, dtype, shape, position))
        position = data + stop
    if position != len(blob):
        raise ValueError(f"{len(blob) - position} bytes follow the last tensor")
    if isinstance(blob, bytes) or blob.readonly:
        return {name: _copied(blob, dtype, shape, start) for name, dtype, shape, start in entries}
    address = np.frombuffer(blob, np.uint8).ctypes.data
    if any((address + start) % _alignment(dtype) for _, dtype, _, start in entries):
        starts = _move_to_alignment(blob, address, [*(start for *_, start in entries), len(blob)])
        entries = [(*entry[:3], start) for entry, start in zip(entries, starts, strict=True)]
    return {name: _tensor_at(blob, dtype, shape, start) for name, dtype, shape, start in entries}


def _alignment(dtype: torch.dtype) -> int:
    """Return of which number the address of a tensor must be a multiple."""
    return ALIGNMENT if dtype.is_floating_point or dtype.is_complex else dtype.itemsize


def _move_to_alignment(blob: memoryview, address: int, bounds: list[int]) -> list[int]:
    """
    Move the tensors of a file to aligned addresses, over its header.

    A tensor moves towards the start of the file by less than 16 bytes for each tensor, and each tensor has more than
    16 bytes in the header, so no tensor overwrites the next one. A copy would need the memory of the message again.

    Args:
        blob (`memoryview`): The file. Its header has been read.
        address (`int`): Address of the file.
        bounds (`list[int]`): First byte of each tensor, and the end of the file.

    Returns:
        `list[int]`: The new first byte of each tensor.
    """
    starts, free = [], 0
    for start, stop in itertools.pairwise(bounds):
        new = free + -(address + free) % ALIGNMENT
        starts.append(new)
        free = new + stop - start
        for position in range(0, stop - start, _MOVED_BYTES):
            size = min(_MOVED_BYTES, stop - start - position)
            blob[new + position : new + position + size] = blob[start + position : start + position + size]
    return starts


def _tensor_at(blob: memoryview, dtype: torch.dtype, shape: list[int], start: int) -> torch.Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(blob, dtype=dtype, count=count, offset=start).reshape(shape)


def _copied(blob: bytes | memoryview, dtype: torch.dtype, shape: list[int], start: int) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    # numpy releases the interpreter's lock while it copies.
    return _tensor_at(np.frombuffer(blob, np.uint8, num_bytes, start).copy().data, dtype, shape, 0)
