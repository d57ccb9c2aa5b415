"""
Vectors over the prime field of p = 2^31 - 1, and the coded masks of LightSecAgg.

[LightSecAgg](https://arxiv.org/abs/2109.14236) (So et al., MLSys 2022), sections 4 and 5: a client adds a mask of d
random elements to its vector and sends a coded share of the mask to each client. The sum of the masks follows from the
sums of the shares of any U clients, and the shares of T clients reveal nothing about a mask.

Coding: the mask is cut into U - T pieces, and T random pieces are appended. The share of point x is the sum of
x^k times piece k over k = 0, …, U - 1 (a Vandermonde matrix). Any U points determine all pieces. The random pieces
contribute x^(U-T) times a Vandermonde matrix of size T to the shares of T points, which is invertible for distinct
points that are not zero, so T shares are uniform for each mask.

A vector of elements is an int32 tensor with values from 0 to p - 1. The module does not authenticate shares: a client
that sends a wrong sum of shares changes the decoded sum.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from .keys import EncryptionError
from .masks import KEY_BYTES, PIECE_BYTES, KeyStream


PRIME = 2**31 - 1

# Sums of float64 are exact below 2^53. After this number of terms, a product is reduced.
_MAX_TERMS = 64
_HALF_BITS = 16

# Columns of a product are computed in pieces of this number of values, which stay in the cache of a core.
_PIECE_VALUES = 2**17
_VALUES_PER_READ = PIECE_BYTES // 4


def field_mask(key: bytes, num_values: int) -> torch.Tensor:
    """
    Expand a key to uniform elements.

    Each element is the lower 31 bits of a word of the AES-256-CTR key stream. Words with the value p are rejected, so
    the distribution has no bias: in each piece of 2^16 elements, they are replaced by the words after the piece.

    Args:
        key (`bytes`): A key of 32 bytes. Use a key for one vector only.
        num_values (`int`): Number of elements.

    Returns:
        `torch.Tensor`: The elements, of shape `(num_values,)` and dtype `int32`.

    Raises:
        EncryptionError: If the key does not have 32 bytes.
    """
    values = torch.empty(num_values, dtype=torch.int32)
    _read_elements(KeyStream(key), values.numpy().view(np.uint32))
    return values


def add_elements(values: torch.Tensor, other: torch.Tensor, subtract: bool = False) -> None:
    """
    Add a vector of elements to another vector modulo p, in place and without a further vector.

    Args:
        values (`torch.Tensor`): The elements to change, a contiguous tensor of shape `(num_values,)`, dtype `int32`.
        other (`torch.Tensor`): The elements to add, of the same shape and dtype.
        subtract (`bool`, *optional*, defaults to `False`): Subtract `other` instead of adding it.

    Raises:
        ValueError: If a tensor has another dtype or shape, or is not contiguous.
    """
    target, source = _unsigned_view(values, len(values)), _unsigned_view(other, len(values))
    for start in range(0, target.size, _VALUES_PER_READ):
        part, added = target[start : start + _VALUES_PER_READ], source[start : start + _VALUES_PER_READ]
        # Sums are below 2^32. The wrong candidate of each minimum wraps around, or is p larger than the right one.
        if subtract:
            np.subtract(part, added, out=part)
            np.minimum(part, part + np.uint32(PRIME), out=part)
        else:
            np.add(part, added, out=part)
            np.minimum(part, part - np.uint32(PRIME), out=part)


def check_elements(values: torch.Tensor, num_values: int, name: str) -> None:
    """
    Check that a received tensor is a vector of elements.

    Args:
        values (`torch.Tensor`): The received tensor.
        num_values (`int`): The expected number of elements.
        name (`str`): What the tensor is, for the error.

    Raises:
        EncryptionError: If the tensor has another dtype or shape, or a value is not an element.
    """
    if values.dtype != torch.int32 or values.shape != (num_values,):
        raise EncryptionError(
            f"{name} has shape {tuple(values.shape)} and dtype {values.dtype}. It must have shape ({num_values},) and"
            " dtype torch.int32."
        )
    if num_values:
        smallest, largest = (int(value) for value in values.aminmax())
        if smallest < 0 or largest >= PRIME:
            raise EncryptionError(f"{name} has values from {smallest} to {largest}. Values are 0 to {PRIME - 1}.")


def encode_mask(mask: torch.Tensor, num_needed: int, num_private: int, points: Sequence[int]) -> torch.Tensor:
    """
    Encode a mask to one share for each point.

    Args:
        mask (`torch.Tensor`): The elements of the mask, of shape `(num_values,)` and dtype `int32`.
        num_needed (`int`): Number of shares that determine the mask, U in the paper.
        num_private (`int`): Number of shares that reveal nothing about the mask, T in the paper.
        points (`Sequence[int]`): The point of each share, distinct numbers from 1 to p - 1.

    Returns:
        `torch.Tensor`: The shares, of shape `(len(points), ceil(num_values / (num_needed - num_private)))` and dtype
        `int32`. The random pieces are new random numbers of the operating system in each call.

    Raises:
        ValueError: If the numbers or the points are not allowed, or the mask has another dtype or is not contiguous.

    Example:

    ```python
    >>> import os
    >>> from hf_federated.security.prime_field import add_elements, decode_sum, encode_mask, field_mask

    >>> north, south = field_mask(os.urandom(32), 10), field_mask(os.urandom(32), 10)
    >>> north_shares = encode_mask(north, num_needed=3, num_private=1, points=[1, 2, 3, 4])
    >>> south_shares = encode_mask(south, num_needed=3, num_private=1, points=[1, 2, 3, 4])
    >>> add_elements(north_shares.view(-1), south_shares.view(-1))
    >>> sums = {point: north_shares[point - 1] for point in (1, 2, 4)}
    >>> decoded = decode_sum(sums, num_needed=3, num_private=1, num_values=10)
    >>> add_elements(north, south)
    >>> decoded.equal(north)
    True
    ```
    """
    _check_code(num_needed, num_private, points)
    values = _unsigned_view(mask, len(mask))
    num_columns = -(-values.size // (num_needed - num_private))
    shares = torch.empty(len(points), num_columns, dtype=torch.int32)
    output, stream = shares.numpy().view(np.uint32), KeyStream(os.urandom(KEY_BYTES))
    product = FieldProduct(coding_matrix(points, num_needed))
    words = np.empty(product.num_columns, np.uint32)
    for start in range(0, num_columns, product.num_columns):
        stop = min(start + product.num_columns, num_columns)
        for row, piece in enumerate(product.rows(stop - start)):
            if row < num_needed - num_private:
                part = values[row * num_columns + start : row * num_columns + stop]
                piece[: part.size] = part
                piece[part.size :] = 0
            else:
                _read_elements(stream, words[: stop - start])
                piece[...] = words[: stop - start]
        product.compute(output[:, start:stop])
    return shares


def decode_sum(shares: Mapping[int, torch.Tensor], num_needed: int, num_private: int, num_values: int) -> torch.Tensor:
    """
    Decode a mask from its shares, or the sum of masks from the sums of their shares.

    Args:
        shares (`Mapping[int, torch.Tensor]`): The share, or the sum of shares, of `num_needed` points.
        num_needed (`int`): Number of shares that determine the mask, as in [`encode_mask`].
        num_private (`int`): Number of shares that reveal nothing, as in [`encode_mask`].
        num_values (`int`): Number of elements of a mask.

    Returns:
        `torch.Tensor`: The elements of the mask or sum, of shape `(num_values,)` and dtype `int32`.

    Raises:
        ValueError: If the numbers or the points are not allowed.
        EncryptionError: If there are more or fewer shares than `num_needed`, or a share has another shape or dtype or
            values that are no elements.
    """
    if len(shares) != num_needed:
        raise EncryptionError(
            f"{len(shares)} shares of masks arrived, but num_needed={num_needed}. Pass exactly {num_needed} shares."
        )
    points = sorted(shares)
    _check_code(num_needed, num_private, points)
    num_pieces = num_needed - num_private
    num_columns = -(-num_values // num_pieces)
    for point in points:
        check_elements(shares[point], num_columns, f"The share of point {point}")
    sources = [_unsigned_view(shares[point].contiguous(), num_columns) for point in points]
    product = FieldProduct(_decoding_matrix(points, num_pieces))
    decoded = torch.empty(num_values, dtype=torch.int32)
    output, pieces = decoded.numpy().view(np.uint32), np.empty((num_pieces, product.num_columns), np.uint32)
    for start in range(0, num_columns, product.num_columns):
        stop = min(start + product.num_columns, num_columns)
        for source, row in zip(sources, product.rows(stop - start), strict=True):
            row[...] = source[start:stop]
        product.compute(pieces[:, : stop - start])
        for number, piece in enumerate(pieces):
            part = output[number * num_columns + start : number * num_columns + stop]
            part[...] = piece[: part.size]
    return decoded


def coding_matrix(points: Sequence[int], num_needed: int) -> list[list[int]]:
    """Compute the Vandermonde matrix of the code: a row for each share, and a column for each piece."""
    return [[pow(point, power, PRIME) for power in range(num_needed)] for point in points]


class FieldProduct:
    """
    Products of one matrix with many columns modulo p, computed exactly in float64.

    A coefficient is low + 2^16 · high with |low| ≤ 2^15 and 0 ≤ high ≤ 2^15. An element is below 2^31, so the product
    of either half with 64 elements is a sum of at most 2^52. Reductions subtract the nearest multiple of p, which is
    exact as well.

    Args:
        matrix (`Sequence[Sequence[int]]`): The coefficients, from 0 to p - 1.

    Attributes:
        num_columns (`int`): The largest number of columns of one product.
    """

    def __init__(self, matrix: Sequence[Sequence[int]]) -> None:
        coefficients = np.array(matrix, np.int64)
        half = 1 << (_HALF_BITS - 1)
        low = ((coefficients + half) & ((1 << _HALF_BITS) - 1)) - half
        self._low = torch.from_numpy(low.astype(np.float64))
        self._high = torch.from_numpy(((coefficients - low) >> _HALF_BITS).astype(np.float64))
        num_rows, num_terms = coefficients.shape
        self.num_columns = max(256, _PIECE_VALUES // max(num_rows, num_terms))
        self._inputs = np.empty(num_terms * self.num_columns)
        self._buffers = [np.empty(num_rows * self.num_columns) for _ in range(3)]

    def rows(self, num_columns: int) -> np.ndarray:
        """Return the float64 matrix, of shape `(num_terms, num_columns)`, to fill before `compute`."""
        self._columns = self._inputs[: self._low.shape[1] * num_columns].reshape(-1, num_columns)
        return self._columns

    def compute(self, output: np.ndarray) -> None:
        """Write the product with the filled columns to a uint32 matrix, as elements."""
        total, part, quotient = (buffer[: output.size].reshape(output.shape) for buffer in self._buffers)
        for start in range(0, len(self._columns), _MAX_TERMS):
            columns = torch.from_numpy(self._columns[start : start + _MAX_TERMS])
            low, high = (half[:, start : start + _MAX_TERMS] for half in (self._low, self._high))
            result = torch.from_numpy(part)
            # The first powers of small points have no high half.
            first = int(high.any(0).int().argmax())
            torch.mm(high[:, first:], columns[first:], out=result)
            _reduce(part, quotient)
            result.addmm_(low, columns, beta=1 << _HALF_BITS)
            if start:
                part += total
            _reduce(part, quotient)
            total, part = part, total
        signed = total.astype(np.int32).view(np.uint32)
        # Adding p to a negative number wraps around to the element.
        np.minimum(signed, signed + np.uint32(PRIME), out=output)


def _reduce(values: np.ndarray, quotient: np.ndarray) -> None:
    """Subtract the nearest multiple of p in place. The absolute values are then at most p / 2 + 1."""
    np.multiply(values, 1 / PRIME, out=quotient)
    np.rint(quotient, out=quotient)
    quotient *= PRIME
    values -= quotient


def _read_elements(stream: KeyStream, output: np.ndarray) -> None:
    """Fill a uint32 vector with uniform elements."""
    for start in range(0, output.size, _VALUES_PER_READ):
        part = output[start : start + _VALUES_PER_READ]
        np.bitwise_and(stream.read(part.nbytes).view("<u4"), np.uint32(PRIME), out=part)
        while part.max() == PRIME:
            rejected = np.flatnonzero(part == PRIME)
            part[rejected] = stream.read(4 * rejected.size).view("<u4") & np.uint32(PRIME)


def _decoding_matrix(points: Sequence[int], num_pieces: int) -> list[list[int]]:
    """
    Compute the first rows of the inverse of the coding matrix of the points.

    The column of a point contains the coefficients of its Lagrange polynomial, which is 1 at the point and 0 at the
    other points: the product of (x - other) over all points, divided by (x - point) and by its value at the point.
    """
    master = [1]
    for point in points:
        master = [(low - point * high) % PRIME for low, high in zip([0, *master], [*master, 0], strict=True)]
    columns = []
    for point in points:
        # The division starts at the highest power.
        quotient = [1]
        for coefficient in master[-2:0:-1]:
            quotient.append((coefficient + point * quotient[-1]) % PRIME)
        value = 0
        for coefficient in quotient:
            value = (value * point + coefficient) % PRIME
        scale = pow(value, -1, PRIME)
        columns.append([coefficient * scale % PRIME for coefficient in quotient[::-1][:num_pieces]])
    return [list(row) for row in zip(*columns, strict=True)]


def _check_code(num_needed: int, num_private: int, points: Sequence[int]) -> None:
    if not 1 <= num_private < num_needed <= len(points):
        raise ValueError(
            f"num_private={num_private} and num_needed={num_needed} are not allowed for {len(points)} shares. At least"
            " 1 share must be private, more shares must be needed, and at most all shares."
        )
    for point in points:
        if not 1 <= point < PRIME:
            raise ValueError(f"Point {point} of a share is not allowed. Points are numbers from 1 to {PRIME - 1}.")
    if len(set(points)) < len(points):
        raise ValueError(f"The points {sorted(points)} are not distinct. Give each share its own point.")


def _unsigned_view(values: torch.Tensor, num_values: int) -> np.ndarray:
    """Return a vector of elements as unsigned integers in the same memory."""
    if values.dtype != torch.int32 or values.shape != (num_values,) or not values.is_contiguous():
        raise ValueError(
            f"The tensor has shape {tuple(values.shape)} and dtype {values.dtype}. A vector of elements must be"
            f" contiguous, with shape ({num_values},) and dtype torch.int32. Convert the tensor first."
        )
    return values.numpy().view(np.uint32)
