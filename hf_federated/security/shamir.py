"""
Shamir secret sharing: a secret is split into shares, any `threshold` of which reveal it and fewer reveal nothing.

[How to Share a Secret](https://dl.acm.org/doi/10.1145/359168.359176) (Shamir, 1979): the secret is the constant term
of a random polynomial of degree `threshold - 1` over a prime field, and a share is the value of the polynomial at a
point. The prime is 2^521 - 1, so a secret of up to 64 bytes is one element of the field, and the number of shares is
not limited to 255. Python integers of this size are faster than tables of GF(2^8).

A share is not authenticated: a client that changes its share can change the secret by a number that it chooses.
Compare the secret with what is known about it, for example the public key of a private key. The arithmetic does not
run in constant time.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence

from .keys import EncryptionError


PRIME = 2**521 - 1
SHARE_BYTES = 66
MAX_SECRET_BYTES = 64
MAX_POINT = 2**16 - 1

_PRODUCTS_PER_REDUCTION = 32


def split_secret(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """
    Split a secret into one share for each point.

    Args:
        secret (`bytes`): The secret, at most 64 bytes.
        threshold (`int`): Number of shares that reveal the secret, at most the number of points.
        points (`Sequence[int]`): The point of each share, distinct numbers from 1 to 65535.

    Returns:
        `dict[int, bytes]`: The share of each point, 66 bytes (big-endian). The coefficients of the polynomial are new
        random numbers of the operating system in each call.

    Raises:
        ValueError: If the secret is too large, or the points or the threshold are not allowed.

    Example:

    ```python
    >>> from hf_federated.security.shamir import combine_shares, split_secret

    >>> shares = split_secret(b"a secret", threshold=2, points=[1, 2, 3])
    >>> combine_shares({1: shares[1], 3: shares[3]}, length=8)
    b'a secret'
    ```
    """
    if len(secret) > MAX_SECRET_BYTES:
        raise ValueError(
            f"The secret has {len(secret)} bytes, but a share holds at most {MAX_SECRET_BYTES} bytes. Split a key from"
            " which the secret is derived."
        )
    if not 1 <= threshold <= len(points):
        raise ValueError(
            f"threshold={threshold} is not allowed for {len(points)} points. Set it to 1 to {len(points)}."
        )
    problem = _problem_of(points)
    if problem:
        raise ValueError(problem)
    # The highest power comes first. A coefficient of zero is as likely as any other coefficient.
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    return {point: _value_at(point, coefficients).to_bytes(SHARE_BYTES, "big") for point in points}


def combine_shares(shares: Mapping[int, bytes], length: int) -> bytes:
    """
    Combine shares to the secret that they were split from.

    Args:
        shares (`Mapping[int, bytes]`): Shares by point, at least as many as the threshold. All of them are used.
        length (`int`): Size of the secret in bytes.

    Raises:
        EncryptionError: If a share or a point is not possible, or the result has more than `length` bytes. With fewer
            shares than the threshold, a result of at most `length` bytes has the probability 256^`length` / 2^521.
    """
    return combine_with(lagrange_weights(shares), shares, length)


def lagrange_weights(points: Collection[int]) -> dict[int, int]:
    """
    Compute the weight of the share of each point in a secret. All secrets with these points have the same weights.

    The weight of point x_i is the product of x_j / (x_j - x_i) over the other points x_j, modulo the prime.

    Raises:
        EncryptionError: If there is no point, or a point is not a number from 1 to 65535.
    """
    problem = _problem_of(points) if points else "There are no shares to combine. Collect at least one share."
    if problem:
        raise EncryptionError(problem)
    weights = {}
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator *= other
                denominator *= other - point
        weights[point] = numerator * pow(denominator, -1, PRIME) % PRIME
    return weights


def combine_with(weights: Mapping[int, int], shares: Mapping[int, bytes], length: int) -> bytes:
    """
    Combine shares as [`combine_shares`] does, with weights that `lagrange_weights` computed for their points.

    Raises:
        EncryptionError: As [`combine_shares`], and if the shares have other points than the weights.
    """
    if shares.keys() != weights.keys():
        raise EncryptionError(
            f"The shares have the points {sorted(shares)}, but the weights belong to {sorted(weights)}. Compute the"
            " weights of these points."
        )
    total = 0
    for point, share in shares.items():
        value = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or value >= PRIME:
            raise EncryptionError(
                f"The share of point {point} has {len(share)} bytes or a value that is too large. A share has"
                f" {SHARE_BYTES} bytes and a value below 2^521 - 1. Ask for the share again."
            )
        total += weights[point] * value
    secret = total % PRIME
    if secret >> (8 * length):
        raise EncryptionError(
            f"{len(shares)} shares do not belong to a secret of {length} bytes: there are fewer shares than the"
            " threshold, or a share is wrong. Use the unchanged shares of one secret."
        )
    return secret.to_bytes(length, "big")


def _value_at(point: int, coefficients: Sequence[int]) -> int:
    """Evaluate a polynomial. A product with a small point adds few bits, so most products need no reduction."""
    value = 0
    for start in range(0, len(coefficients), _PRODUCTS_PER_REDUCTION):
        for coefficient in coefficients[start : start + _PRODUCTS_PER_REDUCTION]:
            value = value * point + coefficient
        value %= PRIME
    return value


def _problem_of(points: Collection[int]) -> str | None:
    """Describe a point that is not allowed. The polynomial at point 0 is the secret."""
    for point in points:
        if not 1 <= point <= MAX_POINT:
            return f"Point {point} of a share is not allowed. Points are numbers from 1 to {MAX_POINT}."
    if len(set(points)) < len(points):
        return f"The points {sorted(points)} are not distinct. Give each share its own point."
    return None
