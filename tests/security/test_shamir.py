"""Shares of a secret: which of them reveal it, and which bytes are refused."""

from __future__ import annotations

import itertools
import os
import secrets

import pytest

from hf_federated.security import shamir
from hf_federated.security.keys import EncryptionError
from hf_federated.security.shamir import PRIME, SHARE_BYTES, combine_shares, combine_with, lagrange_weights


def test_every_set_of_threshold_shares_reveals_the_secret():
    secret = os.urandom(32)
    for threshold in range(1, 6):
        shares = shamir.split_secret(secret, threshold, [3, 1, 65535, 40, 2])
        assert all(len(share) == SHARE_BYTES for share in shares.values())
        for points in itertools.combinations(shares, threshold):
            assert combine_shares({point: shares[point] for point in points}, 32) == secret
        assert combine_shares(shares, 32) == secret


def test_fewer_shares_than_the_threshold_are_refused():
    shares = shamir.split_secret(bytes(32), 4, range(1, 8))
    for points in itertools.combinations(shares, 3):
        with pytest.raises(EncryptionError, match="3 shares do not belong to a secret of 32 bytes"):
            combine_shares({point: shares[point] for point in points}, 32)


def test_fewer_shares_than_the_threshold_agree_with_every_secret():
    """For each other secret there is one polynomial through the known shares, so the shares do not favor a secret."""
    shares = shamir.split_secret(b"right", 3, [1, 2, 3])
    for guess in (b"wrong", bytes(5), b"right"):
        known = {0: int.from_bytes(guess, "big"), 1: int.from_bytes(shares[1], "big")}
        # The polynomial of degree 2 through the guess, share 1 and any value at 2: its value at 3 is a share too.
        known[2] = secrets.randbelow(PRIME)
        third = (known[0] - 3 * known[1] + 3 * known[2]) % PRIME
        forged = {point: value.to_bytes(SHARE_BYTES, "big") for point, value in {**known, 3: third}.items() if point}
        assert combine_shares(forged, 5) == guess


def test_shares_are_values_of_the_polynomial_of_the_random_coefficients(monkeypatch):
    coefficients = [secrets.randbelow(PRIME) for _ in range(99)]
    drawn = iter(coefficients)
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda bound: next(drawn))
    secret = os.urandom(64)
    shares = shamir.split_secret(secret, 100, [*range(1, 100), 65535])
    for point, share in shares.items():
        powers = sum(value * pow(point, 99 - i, PRIME) for i, value in enumerate(coefficients))
        assert int.from_bytes(share, "big") == (powers + int.from_bytes(secret, "big")) % PRIME


def test_shares_of_two_calls_differ():
    first, second = (shamir.split_secret(b"the same secret", 2, [1, 2]) for _ in range(2))
    assert first[1] != second[1] and first[2] != second[2]


@pytest.mark.parametrize("secret", [b"", b"\0", bytes(32), b"\xff" * 64], ids=["empty", "zero", "zeros", "largest"])
def test_secrets_at_the_edge_are_kept(secret):
    shares = shamir.split_secret(secret, 2, [5, 6])
    assert combine_shares(shares, len(secret)) == secret


def test_weights_serve_many_secrets_of_the_same_points():
    points = [4, 9, 2]
    weights = lagrange_weights(points)
    for _ in range(3):
        secret = os.urandom(32)
        assert combine_with(weights, shamir.split_secret(secret, 3, points), 32) == secret
    with pytest.raises(EncryptionError, match=r"points \[2, 4\], but the weights belong to \[2, 4, 9\]"):
        combine_with(weights, shamir.split_secret(secret, 2, [4, 2]), 32)


@pytest.mark.parametrize(
    "share", [b"", bytes(65), bytes(67), PRIME.to_bytes(66, "big"), b"\xff" * 66], ids=["0", "65", "67", "p", "large"]
)
def test_impossible_share_is_refused(share):
    shares = {**shamir.split_secret(b"secret", 2, [1, 2]), 2: share}
    with pytest.raises(EncryptionError, match=f"The share of point 2 has {len(share)} bytes or a value"):
        combine_shares(shares, 6)


def test_share_of_another_secret_is_recognized_but_a_chosen_change_is_not():
    """The caller compares the secret with what it knows, because a change of a share adds its multiple to a secret."""
    secret = os.urandom(31)
    shares = shamir.split_secret(b"\1" + secret, 2, [1, 2])
    with pytest.raises(EncryptionError, match="2 shares do not belong to a secret of 32 bytes"):
        combine_shares({1: shares[1], 2: shamir.split_secret(secret, 2, [1, 2])[2]}, 32)
    changed = (int.from_bytes(shares[2], "big") + 256**31) % PRIME  # The weight of point 2 is -1.
    assert combine_shares({1: shares[1], 2: changed.to_bytes(SHARE_BYTES, "big")}, 32) == b"\0" + secret


@pytest.mark.parametrize(
    ("secret", "threshold", "points", "message"),
    [
        (bytes(65), 1, [1], "65 bytes, but a share holds at most 64"),
        (b"s", 0, [1, 2], "threshold=0 is not allowed for 2 points"),
        (b"s", 3, [1, 2], "threshold=3 is not allowed for 2 points"),
        (b"s", 1, [], "threshold=1 is not allowed for 0 points"),
        (b"s", 1, [0, 1], "Point 0 of a share is not allowed"),
        (b"s", 1, [1, 65536], "Point 65536 of a share is not allowed"),
        (b"s", 2, [1, 2, 1], r"points \[1, 1, 2\] are not distinct"),
    ],
)
def test_split_refuses_what_it_cannot_share(secret, threshold, points, message):
    with pytest.raises(ValueError, match=message):
        shamir.split_secret(secret, threshold, points)


@pytest.mark.parametrize("points", [[], [0], [-1], [65536]])
def test_combine_refuses_impossible_points(points):
    with pytest.raises(EncryptionError, match=r"no shares to combine|Point -?\d+ of a share is not allowed"):
        combine_shares(dict.fromkeys(points, bytes(SHARE_BYTES)), 32)
