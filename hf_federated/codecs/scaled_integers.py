"""`Int8` and `Int4`: integers with one scale for each block of values, for `exchange_codec`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn import functional

from ..utils.weighted_mean import Tensors
from .base import Codec, Layout, Shapes


# Number of values with a common scale.
BLOCK_SIZE = 256
_SCALE_BYTES = torch.float32.itemsize


class Int8(Codec):
    """
    Quantizes blocks of 256 consecutive values of a tensor to integers from -127 to 127: `n = round(x / scale)`.

    The scale is the largest magnitude of the block divided by 127, in float32. A value takes 8.125 bits, and its error
    is at most half of a scale. Zero stays zero. A tensor is sent as one tensor of bytes under its own name: the scales
    and then the integers.

    Relations:
        [`QuantizedBlocks`] adds a zero point to each block, for values whose range is not symmetric.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import Int8

    >>> codec, change = Int8(), {"w": torch.linspace(-1, 1, 512)}
    >>> codec.encode(change)["w"].shape
    torch.Size([520])
    >>> float((codec.decode(codec.encode(change), change)["w"] - change["w"]).abs().max()) < 0.5 / 127
    True
    ```
    """

    bits: ClassVar[int] = 8

    def layout(self, shapes: Shapes) -> Layout:
        return {name: (torch.uint8, (self._num_bytes(shape),)) for name, shape in shapes.items()}

    def _num_bytes(self, shape: Sequence[int]) -> int:
        num_values = math.prod(shape)
        return math.ceil(num_values / BLOCK_SIZE) * _SCALE_BYTES + math.ceil(num_values * self.bits / 8)

    @property
    def _largest(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def compress(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {name: self._compress(value.detach().cpu().float().reshape(-1)) for name, value in tensors.items()}

    def _compress(self, values: torch.Tensor) -> torch.Tensor:
        num_values = len(values)
        blocks = functional.pad(values, (0, -num_values % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
        scales = blocks.abs().amax(dim=1) / self._largest
        # The scale of a block with NaN or infinite values is NaN, and so is the block after decoding.
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        steps = (blocks / torch.where(scales > 0, scales, 1).unsqueeze(1)).round().clamp(-self._largest, self._largest)
        integers = self._pack(steps.nan_to_num().to(torch.int8).view(-1)[:num_values])
        return torch.cat([scales.view(torch.uint8), integers.view(torch.uint8)])

    def _pack(self, integers: torch.Tensor) -> torch.Tensor:
        return integers

    def _unpack(self, packed: torch.Tensor, num_values: int) -> torch.Tensor:
        return packed.view(torch.int8)

    def decode(self, encoded: Tensors, reference: Tensors) -> dict[str, torch.Tensor]:
        """
        Decode what [`~Codec.encode`] returned. All machines compute the same bytes.

        Args:
            encoded (`Mapping[str, torch.Tensor]`): The received tensors. They are untrusted input.
            reference (`Mapping[str, torch.Tensor]`): Tensors with the names and shapes of the encoded ones.

        Returns:
            `dict[str, torch.Tensor]`: The decoded tensors, float32, on the CPU. A block with NaN or infinite values is
                NaN.

        Raises:
            ValueError: If the names, dtypes or shapes of `encoded` differ from [`~Codec.layout`].
        """
        self.check(encoded, {name: value.shape for name, value in reference.items()})
        return {name: self._decode(encoded[name], value.shape) for name, value in reference.items()}

    def _decode(self, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        num_values = math.prod(shape)
        num_scale_bytes = math.ceil(num_values / BLOCK_SIZE) * _SCALE_BYTES
        # A copy is aligned for float32.
        scales = packed[:num_scale_bytes].clone().view(torch.float32)
        values = self._unpack(packed[num_scale_bytes:], num_values).float()
        blocks = functional.pad(values, (0, -num_values % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
        return (blocks * scales.unsqueeze(1)).view(-1)[:num_values].view(shape)


class Int4(Int8):
    """
    Quantizes as [`Int8`], with integers from -7 to 7, two in each byte. A value takes 4.125 bits.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import Int4

    >>> codec, change = Int4(), {"w": torch.tensor([7.0, -3.2, 0.0])}
    >>> codec.decode(codec.encode(change), change)["w"]
    tensor([ 7., -3.,  0.])
    ```
    """

    bits: ClassVar[int] = 4

    def _pack(self, integers: torch.Tensor) -> torch.Tensor:
        # From 1 to 15, the first integer of a byte in the lower bits.
        nibbles = functional.pad(integers + 8, (0, len(integers) % 2)).to(torch.uint8)
        return nibbles[::2] | nibbles[1::2] << 4

    def _unpack(self, packed: torch.Tensor, num_values: int) -> torch.Tensor:
        return torch.stack((packed & 15, packed >> 4), dim=1).view(-1)[:num_values].to(torch.int8) - 8
