"""`TopK`: the values with the largest magnitudes of each tensor, and their places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..utils.arguments import require
from ..utils.weighted_mean import Tensors
from .base import Codec, Layout, Shapes
from .bits import pack_mask, unpack_mask


@dataclass(frozen=True, repr=False)
class TopK(Codec):
    """
    Keeps the share of the values of each tensor with the largest magnitudes. The other values become zero.

    The operator is that of [Alistarh et al., 2018](https://arxiv.org/abs/1809.10505) and [Stich et al.,
    2018](https://arxiv.org/abs/1809.07599). It is biased: error feedback sends small values later.

    A tensor of `n` values with `k = ⌈share · n⌉` is sent as one tensor of bytes under its own name: `k` values in
    bfloat16 in the order of the tensor, and their places. The places are the shorter of one bit for each of the `n`
    values, and `k` indices (2 bytes up to `n = 65536`, otherwise 4 bytes). A tensor of which all values are kept is
    sent in float32, without places.

    Args:
        share (`float`, *optional*, defaults to `0.1`): Share of the values that are kept, above 0 and at most 1. With
            1, nothing is lost.

    Raises:
        ValueError: If `share` is not above 0 and at most 1.

    Relations:
        Suits changes with few large values. [`Int8`] and [`Int4`] suit dense changes, such as those of LoRA factors.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import TopK

    >>> codec, change = TopK(share=0.4), {"w": torch.tensor([1.0, -4.0, 0.5, 2.0, 0.0])}
    >>> codec.decode(codec.encode(change), change)["w"]
    tensor([ 0., -4.,  0.,  2.,  0.])
    >>> codec.num_bytes({"w": (768, 768)}), 4 * 768 * 768
    (545588, 2359296)
    ```
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        require("share", self.share, 0 < self.share <= 1, "above 0 and at most 1")

    @property
    def is_exact(self) -> bool:
        return self.share == 1

    def layout(self, shapes: Shapes) -> Layout:
        return {name: self._layout(shape) for name, shape in shapes.items()}

    def _layout(self, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
        num_values = math.prod(shape)
        num_kept = self._num_kept(num_values)
        if num_kept == num_values:
            return torch.float32, tuple(shape)
        return torch.uint8, (2 * num_kept + _num_place_bytes(num_values, num_kept),)

    def _num_kept(self, num_values: int) -> int:
        # The product of a share and a number can be slightly above an integer.
        return min(num_values, max(1, math.ceil(round(self.share * num_values, 6))))

    def compress(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {name: self._compress(value.detach().cpu()) for name, value in tensors.items()}

    def _compress(self, value: torch.Tensor) -> torch.Tensor:
        num_values = value.numel()
        num_kept = self._num_kept(num_values)
        if num_kept == num_values:
            return value.to(torch.float32, copy=True)
        flat = value.reshape(-1).float()
        # A sort of the indices is faster than sorted values.
        indices = flat.abs().topk(num_kept, sorted=False).indices.sort().values
        places: torch.Tensor
        if (dtype := _index_dtype(num_values, num_kept)) is None:
            places = pack_mask(torch.zeros(1, num_values, dtype=torch.bool).index_fill_(1, indices, True))
        else:
            places = indices.to(torch.int32).to(dtype)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in (flat[indices].to(torch.bfloat16), places)])

    def decode(self, encoded: Tensors, reference: Tensors) -> dict[str, torch.Tensor]:
        """
        Decode what [`~Codec.encode`] returned.

        Args:
            encoded (`Mapping[str, torch.Tensor]`): The received tensors. They are untrusted input.
            reference (`Mapping[str, torch.Tensor]`): Tensors with the names and shapes of the encoded ones.

        Returns:
            `dict[str, torch.Tensor]`: The decoded tensors, float32, on the CPU.

        Raises:
            ValueError: If the names, dtypes or shapes of `encoded` differ from [`~Codec.layout`], or if the places are
                not ascending places of the tensor, one for each value.
        """
        self.check(encoded, {name: value.shape for name, value in reference.items()})
        return {name: self._decode(name, encoded[name], value.shape) for name, value in reference.items()}

    def _decode(self, name: str, packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        num_values = math.prod(shape)
        num_kept = self._num_kept(num_values)
        if num_kept == num_values:
            return packed
        # A copy is aligned for every dtype.
        values, places = (part.clone() for part in packed.split([2 * num_kept, len(packed) - 2 * num_kept]))
        if (dtype := _index_dtype(num_values, num_kept)) is None:
            indices = unpack_mask(places.view(1, -1), num_values)[0].nonzero()[:, 0]
        else:
            indices = places.view(dtype).long() & _LARGEST[dtype]
        is_ascending = bool((indices[1:] > indices[:-1]).all())
        if len(indices) != num_kept or not is_ascending or int(indices[-1]) >= num_values:
            raise ValueError(
                f"{name!r} of encoded {self.content} has wrong places; {self} sends {num_kept} ascending places "
                f"below {num_values} for a tensor of shape {tuple(shape)}."
            )
        decoded = torch.zeros(num_values)
        decoded[indices] = values.view(torch.bfloat16).float()
        return decoded.view(shape)


# The integers of indices are read as unsigned.
_LARGEST = {torch.int16: 2**16 - 1, torch.int32: 2**32 - 1}


def _index_dtype(num_values: int, num_kept: int) -> torch.dtype | None:
    """Return the dtype of the indices of the kept values, or `None` if a bit for each value is shorter."""
    dtype = torch.int16 if num_values <= 2**16 else torch.int32
    return dtype if num_kept * dtype.itemsize < math.ceil(num_values / 8) else None


def _num_place_bytes(num_values: int, num_kept: int) -> int:
    dtype = _index_dtype(num_values, num_kept)
    return math.ceil(num_values / 8) if dtype is None else num_kept * dtype.itemsize
