"""`Ring`: the integers modulo a number, in which the encoded updates of clients are added."""

from __future__ import annotations

import torch

from ..security.prime_field import PRIME


MODULI = (2**32, 2**16, PRIME)
# Number of elements that are reduced at a time.
_PIECE = 2**18


class Ring:
    """
    Vectors of integers modulo 2^32, 2^16 or the prime 2^31 - 1.

    A vector modulo m = 2^32 (`int32`) or 2^16 (`int16`) contains signed integers in two's complement. A vector modulo
    the prime (`int32`) contains n mod m, from 0 to m - 1, for an integer n from -(m - 1) / 2 to (m - 1) / 2.

    Args:
        modulus (`int`): `2**32`, `2**16` or `PRIME`.

    Attributes:
        bits (`int`): Number of bits of an element: 32, 16 or 31.
        dtype (`torch.dtype`): Dtype of a vector.
        total_dtype (`torch.dtype`): Dtype of a sum of vectors. It is `int64` for the prime, so that sums of several
            processes can be added before they are reduced.

    Raises:
        ValueError: If the modulus is not supported.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.secure_aggregation.ring import Ring

    >>> ring = Ring(2**16)
    >>> total = torch.tensor([30_000, -1], dtype=torch.int16)
    >>> ring.add_(total, torch.tensor([30_000, 3], dtype=torch.int16))
    >>> total.tolist()
    [-5536, 2]
    ```
    """

    def __init__(self, modulus: int = 2**32) -> None:
        if modulus not in MODULI:
            raise ValueError(f"`modulus` is {modulus!r}; allowed are 2**32, 2**16 and 2**31 - 1.")
        self.modulus = modulus
        self.bits = (modulus - 1).bit_length()
        self.is_field = modulus == PRIME
        self.dtype = torch.int16 if self.bits == 16 else torch.int32
        self.total_dtype = torch.int64 if self.is_field else self.dtype

    def add_(self, total: torch.Tensor, vector: torch.Tensor) -> None:
        """
        Add a vector to a sum, in place. The sum modulo the prime is reduced to the range from 0 to the prime.

        Args:
            total (`torch.Tensor`, dtype `total_dtype`): The sum.
            vector (`torch.Tensor`, dtype `dtype`): The vector.
        """
        if not self.is_field:
            total.add_(vector)
            return
        for part, addend in zip(total.split(_PIECE), vector.split(_PIECE), strict=True):
            part.add_(addend).remainder_(self.modulus)

    def from_signed_(self, values: torch.Tensor) -> None:
        """Replace signed integers of dtype `dtype` by elements, in place."""
        if self.is_field:
            # A right shift of a negative number gives -1, whose bits are all set.
            values.add_((values >> 31).bitwise_and_(self.modulus))

    def to_signed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the signed integers of the elements of a vector or a sum."""
        if not self.is_field:
            return values
        reduced = values.to(torch.int64).remainder_(self.modulus)
        return reduced.sub_((reduced > self.modulus // 2).to(torch.int64), alpha=self.modulus)

    def problem(self, vector: torch.Tensor, num_values: int) -> str | None:
        """
        Return why a received tensor is not a vector of the ring, or `None`.

        Args:
            vector (`torch.Tensor`): The received tensor.
            num_values (`int`): The expected number of elements.
        """
        if vector.dtype != self.dtype or vector.shape != (num_values,):
            return (
                f"its vector has the shape {tuple(vector.shape)} and the dtype {vector.dtype}, but the shape "
                f"{(num_values,)} and the dtype {self.dtype} are expected"
            )
        if self.is_field and num_values:
            low, high = (int(value) for value in torch.aminmax(vector))
            if low < 0 or high >= self.modulus:
                return f"its vector has values from {low} to {high}, but values from 0 to 2**31 - 2 are expected"
        return None
