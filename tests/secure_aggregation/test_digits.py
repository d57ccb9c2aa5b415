"""Sums of large integers from sums of their digits in a ring."""

from __future__ import annotations

import random

import pytest
import torch

from hf_federated.secure_aggregation.digits import Digits
from hf_federated.secure_aggregation.ring import Ring
from hf_federated.security.prime_field import PRIME


MODULI = [2**32, 2**16, PRIME]
EDGES = sorted(
    {
        sign * 2**power + offset
        for power in (0, 1, 15, 16, 31, 32, 62, 63, 64, 125)
        for sign in (1, -1)
        for offset in (-1, 0, 1)
    }
    | {0, 2**126 - 1, -(2**126)}
)


@pytest.mark.parametrize(
    ("modulus", "num_clients"),
    [
        *[(modulus, number) for modulus in MODULI for number in (1, 2, 3, 5, 255, 256)],
        *[(modulus, number) for modulus in (2**32, PRIME) for number in (257, 65_535, 65_536, 65_537, 2**23)],
    ],
)
def test_sum_of_equal_edges_is_exact(modulus, num_clients):
    """All clients send the same integer, so each sum of digits is as large as it can be."""
    digits = Digits(Ring(modulus), num_clients)
    for number in EDGES:
        sums = [num_clients * digit % modulus for digit in digits.split(number)]
        assert digits.join(sums) == num_clients * number


@pytest.mark.parametrize("modulus", MODULI)
@pytest.mark.parametrize("num_clients", [1, 2, 7, 256])
def test_sum_of_vectors_of_edges_is_exact(modulus, num_clients):
    generator, ring = random.Random(num_clients), Ring(modulus)
    digits = Digits(ring, num_clients)
    for _ in range(20):
        numbers = [generator.choice(EDGES) for _ in range(num_clients)]
        total = torch.zeros(digits.num_digits, dtype=ring.total_dtype)
        for number in numbers:
            ring.add_(total, torch.tensor(digits.split(number), dtype=ring.dtype))
        assert digits.join(total.tolist()) == sum(numbers)


@pytest.mark.parametrize("modulus", [2**32, PRIME])
def test_sum_over_65536_clients_is_exact(modulus):
    generator, ring, num_clients = random.Random(0), Ring(modulus), 65_536
    digits = Digits(ring, num_clients)
    numbers = [generator.randrange(-(2**63), 2**63) for _ in range(num_clients)]
    vectors = torch.tensor([digits.split(number) for number in numbers], dtype=ring.dtype)
    total = vectors.sum(0, dtype=ring.total_dtype)
    assert digits.join(total.tolist()) == sum(numbers)


@pytest.mark.parametrize("modulus", MODULI)
def test_each_small_integer_is_exact_in_few_bits(modulus):
    # 256 clients leave 8 bits of 16.
    digits = Digits(Ring(modulus), 256)
    for number in range(-1100, 1100):
        assert digits.join(digits.split(number)) == number
    for first in range(-20, 20):
        for second in range(-300, 300, 7):
            sums = [sum(pair) % modulus for pair in zip(digits.split(first), digits.split(second), strict=True)]
            assert digits.join(sums) == first + second


@pytest.mark.parametrize("number", [2**126, -(2**126) - 1])
def test_integer_out_of_range_raises_an_error(number):
    with pytest.raises(ValueError, match=r"is out of range; it must be at least -2\*\*126 and below 2\*\*126"):
        Digits(Ring(), 2).split(number)
