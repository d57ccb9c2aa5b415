"""Sums of vectors modulo 2^32, 2^16 and a prime."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_federated.secure_aggregation.ring import Ring
from hf_federated.security.prime_field import PRIME


MODULI = [2**32, 2**16, PRIME]


def vector_of(ring: Ring, numbers: list[int]) -> torch.Tensor:
    vector = torch.tensor(numbers, dtype=ring.dtype)
    ring.from_signed_(vector)
    return vector


@pytest.mark.parametrize("modulus", MODULI)
def test_sums_equal_those_of_python_integers(modulus):
    ring, half = Ring(modulus), (modulus - 1) // 2
    edges = [0, 1, -1, 2, -2, half, half - 1, -half, 1 - half, half // 2, -(half // 3)]
    for numbers in itertools.product(edges, repeat=3):
        total = torch.zeros(1, dtype=ring.total_dtype)
        for number in numbers:
            ring.add_(total, vector_of(ring, [number]))
        expected = (sum(numbers) + half) % modulus - half
        assert ring.to_signed(total).item() in (expected, expected - modulus)
        if abs(sum(numbers)) <= half:
            assert ring.to_signed(total).item() == sum(numbers)


@pytest.mark.parametrize("modulus", MODULI)
def test_long_vectors_wrap_around_in_each_element(modulus):
    ring = Ring(modulus)
    numbers = torch.arange(2**18 + 5) * 8191 % modulus
    vector = (numbers if ring.is_field else (numbers + modulus // 2) % modulus - modulus // 2).to(ring.dtype)
    total = torch.zeros(len(vector), dtype=ring.total_dtype)
    for _ in range(5):
        ring.add_(total, vector)
    assert torch.equal(total.to(torch.int64) % modulus, numbers * 5 % modulus)
    if ring.is_field:
        assert 0 <= int(total.min()) and int(total.max()) < PRIME


def test_sums_of_the_field_can_be_added_before_they_are_reduced():
    ring = Ring(PRIME)
    totals = []
    for numbers in ([5, -7], [-6, -3], [2**30 - 1, 0]):
        totals.append(torch.zeros(2, dtype=ring.total_dtype))
        ring.add_(totals[-1], vector_of(ring, numbers))
    assert ring.to_signed(sum(totals)).tolist() == [2**30 - 2, -10]
    assert ring.to_signed(vector_of(ring, [-3, 3])).tolist() == [-3, 3]


@pytest.mark.parametrize("modulus", MODULI)
def test_vector_of_another_kind_is_a_problem(modulus):
    ring = Ring(modulus)
    assert ring.problem(torch.zeros(3, dtype=ring.dtype), 3) is None
    assert ring.problem(torch.zeros(0, dtype=ring.dtype), 0) is None
    for vector in (torch.zeros(2, dtype=ring.dtype), torch.zeros(3, 1, dtype=ring.dtype), torch.zeros(3)):
        assert "are expected" in str(ring.problem(vector, 3))
    wide = torch.zeros(3, dtype=torch.int64)
    assert "int64" in str(ring.problem(wide, 3))
    for value in (-1, PRIME):
        outside = torch.tensor([0, value, 1], dtype=torch.int32)
        assert modulus != PRIME or f"{value}" in str(ring.problem(outside, 3))


def test_other_moduli_are_refused():
    with pytest.raises(ValueError, match=r"`modulus` is 256; allowed are 2\*\*32, 2\*\*16 and 2\*\*31 - 1"):
        Ring(256)
