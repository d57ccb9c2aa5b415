"""`QuantizedBlocks`: integers of 8 or 4 bits for the values of any tensors, such as the changes of an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..utils.arguments import require
from ..utils.weighted_mean import Tensors
from .base import Codec, Layout, Shapes
from .row_bytes import num_row_bytes, pack_rows, unpack_rows


# Number of values of a row of bytes. A scale and a zero point in 8 bits need 3 % of a row.
BLOCK_SIZE = 256


@dataclass(frozen=True)
class QuantizedBlocks(Codec):
    """
    Quantizes blocks of 256 consecutive values of a tensor, independently of the shape of the tensor.

    With 8 bits, each block has a scale and a zero point. A value takes 8.25 bits, and its error is at most 1/510 times
    the range of its block. With 4 bits, each group of 64 values has a scale and a zero point. A value takes 5 bits,
    and its error is at most 1/30 times the range of its group. A tensor of fewer than 256 values is one shorter block.
    Each tensor is sent as one tensor of bytes under its own name.

    Args:
        bits (`int`, *optional*, defaults to `8`): 8 or 4.

    Raises:
        ValueError: If `bits` is neither 8 nor 4.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import QuantizedBlocks

    >>> codec, change = QuantizedBlocks(bits=4), {"w": torch.linspace(-1, 1, 512).reshape(2, 256)}
    >>> encoded = codec.encode(change)
    >>> encoded["w"].shape, codec.num_bytes({"w": (2, 256)})
    (torch.Size([2, 160]), 320)
    >>> float((codec.decode(encoded, change)["w"] - change["w"]).abs().max()) < 1 / 30
    True
    ```
    """

    bits: int = 8

    def __post_init__(self) -> None:
        require("bits", self.bits, self.bits in (8, 4), "8 or 4")

    def layout(self, shapes: Shapes) -> Layout:
        return {name: (torch.uint8, self._byte_shape(shape)) for name, shape in shapes.items()}

    def _byte_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the number of blocks of a tensor and the number of bytes of a block."""
        num_rows, width = _blocks(shape)
        return num_rows, num_row_bytes(self._dtype, width)

    def compress(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {name: self._compress(value) for name, value in tensors.items()}

    def _compress(self, value: torch.Tensor) -> torch.Tensor:
        num_rows, width = _blocks(value.shape)
        if not num_rows:
            return torch.empty(self._byte_shape(value.shape), dtype=torch.uint8)
        # The repeated last value does not change the range of the last block.
        padding = num_rows * width - value.numel()
        values = functional.pad(value.float().reshape(1, -1), (0, padding), mode="replicate")
        return pack_rows(self._dtype, values.view(num_rows, width))[self._dtype]

    def decode(self, encoded: Tensors, reference: Tensors) -> dict[str, torch.Tensor]:
        """
        Decode what [`~Codec.encode`] returned.

        Args:
            encoded (`Mapping[str, torch.Tensor]`): The received tensors. They are untrusted input.
            reference (`Mapping[str, torch.Tensor]`): Tensors with the names and shapes of the encoded ones.

        Returns:
            `dict[str, torch.Tensor]`: The decoded tensors, float32, on the device of the received tensors. A block
            with NaN or infinite values is NaN.

        Raises:
            ValueError: If the names, dtypes or shapes of `encoded` differ from [`~Codec.layout`].
        """
        self.check(encoded, {name: value.shape for name, value in reference.items()})
        decoded = {}
        for name, value in reference.items():
            rows = unpack_rows(self._dtype, {self._dtype: encoded[name]}, _blocks(value.shape)[1])
            decoded[name] = rows.flatten()[: value.numel()].view(value.shape)
        return decoded

    @property
    def _dtype(self) -> str:
        return f"int{self.bits}"


def _blocks(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of blocks of a tensor and the number of values of a block."""
    num_values = math.prod(shape)
    width = max(1, min(num_values, BLOCK_SIZE))
    return math.ceil(num_values / width), width
