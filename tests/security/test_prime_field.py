"""Coded masks over the prime field, compared with plain Python integers."""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import pytest
import torch

from hf_federated.security import prime_field
from hf_federated.security.keys import EncryptionError
from hf_federated.security.masks import KeyStream
from hf_federated.security.prime_field import (
    PRIME,
    add_elements,
    check_elements,
    coding_matrix,
    decode_sum,
    encode_mask,
    field_mask,
)


RANDOM = random.Random(0)

# Number of shares, needed shares and private shares.
CODES = [(8, 6, 3), (16, 11, 5), (2, 2, 1), (5, 5, 4)]


def elements(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_elements(num_values: int) -> list[int]:
    """Elements with many values at the edges of the field."""
    edges = (0, 1, 2**16, 2**30, PRIME - 2, PRIME - 1)
    return [RANDOM.choice(edges) if RANDOM.random() < 0.5 else RANDOM.randrange(PRIME) for _ in range(num_values)]


def share_of(point: int, pieces: list[list[int]]) -> list[int]:
    columns = zip(*pieces, strict=True)
    return [sum(value * pow(point, power, PRIME) for power, value in enumerate(column)) % PRIME for column in columns]


def solve(matrix: list[list[int]], right: list[list[int]]) -> list[list[int]] | None:
    """Solve a system of linear equations modulo p by elimination. Return `None` if the matrix is singular."""
    rows = [[*left, *values] for left, values in zip(matrix, right, strict=True)]
    for step in range(len(rows)):
        pivot = next((row for row in range(step, len(rows)) if rows[row][step]), None)
        if pivot is None:
            return None
        rows[step], rows[pivot] = rows[pivot], rows[step]
        inverse = pow(rows[step][step], -1, PRIME)
        rows[step] = [value * inverse % PRIME for value in rows[step]]
        for row in range(len(rows)):
            if row != step:
                factor = rows[row][step]
                rows[row] = [(a - factor * b) % PRIME for a, b in zip(rows[row], rows[step], strict=True)]
    return [row[len(rows) :] for row in rows]


def cut(mask: list[int], num_pieces: int) -> list[list[int]]:
    length = -(-len(mask) // num_pieces)
    padded = mask + [0] * (num_pieces * length - len(mask))
    return [padded[i * length : (i + 1) * length] for i in range(num_pieces)]


@pytest.mark.parametrize("num_values", [1, 2, 47, 48])
@pytest.mark.parametrize("code", CODES, ids=str)
def test_shares_are_values_of_the_polynomial_of_the_pieces(code, num_values):
    num_shares, num_needed, num_private = code
    mask, points = random_elements(num_values), RANDOM.sample(range(1, 2**16), num_shares)
    shares = encode_mask(elements(mask), num_needed, num_private, points).tolist()
    powers = [[pow(point, power, PRIME) for power in range(num_needed)] for point in points]
    pieces = solve(powers[:num_needed], shares[:num_needed])
    assert pieces is not None
    assert pieces[: num_needed - num_private] == cut(mask, num_needed - num_private)
    assert shares == [share_of(point, pieces) for point in points]


@pytest.mark.parametrize("num_values", [1, 2, 47, 48])
@pytest.mark.parametrize("code", CODES, ids=str)
def test_any_needed_shares_decode_to_the_sum_of_masks(code, num_values):
    num_shares, num_needed, num_private = code
    num_pieces, points = num_needed - num_private, range(1, num_shares + 1)
    masks = [random_elements(num_values) for _ in range(3)]
    expected = [sum(values) % PRIME for values in zip(*masks, strict=True)]
    columns = -(-num_values // num_pieces)
    sums = {point: [0] * columns for point in points}
    for mask in masks:
        pieces = cut(mask, num_pieces) + [random_elements(columns) for _ in range(num_private)]
        for point in points:
            sums[point] = [(a + b) % PRIME for a, b in zip(sums[point], share_of(point, pieces), strict=True)]
    survivors = list(itertools.combinations(points, num_needed))
    for kept in RANDOM.sample(survivors, min(28, len(survivors))):
        decoded = decode_sum({point: elements(sums[point]) for point in kept}, num_needed, num_private, num_values)
        assert decoded.tolist() == expected


def test_masked_sum_with_lost_clients_is_exact():
    """The whole protocol: 8 clients, of which one is lost before the masked vectors, and two before the shares."""
    vectors = [elements(random_elements(1001)) for _ in range(8)]
    masks = [field_mask(os.urandom(32), 1001) for _ in range(8)]
    shares = [encode_mask(mask, 6, 3, range(1, 9)) for mask in masks]
    total = torch.zeros(1001, dtype=torch.int32)
    for client in range(7):
        masked = vectors[client].clone()
        add_elements(masked, masks[client])
        add_elements(total, masked)
    sums = {}
    for point in (1, 3, 4, 6, 7, 8):
        sums[point] = torch.zeros(334, dtype=torch.int32)
        for client in range(7):
            add_elements(sums[point], shares[client][point - 1])
    add_elements(total, decode_sum(sums, 6, 3, 1001), subtract=True)
    assert total.tolist() == [sum(values) % PRIME for values in zip(*(v.tolist() for v in vectors[:7]), strict=True)]


def test_large_mask_in_several_pieces_of_columns_is_decoded():
    mask = field_mask(os.urandom(32), 300_001)
    shares = encode_mask(mask, 7, 3, range(1, 11))
    decoded = decode_sum({point: shares[point - 1] for point in (10, 2, 3, 9, 5, 8, 7)}, 7, 3, 300_001)
    assert torch.equal(decoded, mask)


def test_coding_needs_memory_for_its_result_only(peak_memory):
    mask = field_mask(bytes(32), 2**22)
    shares = encode_mask(mask, 7, 3, range(1, 11))  # Loads the libraries of the product.
    buffers = 8 * 2**20
    assert peak_memory(lambda: encode_mask(mask, 7, 3, range(1, 11))) < shares.nbytes + buffers
    kept = {point: shares[point - 1] for point in range(4, 11)}
    assert peak_memory(lambda: decode_sum(kept, 7, 3, len(mask))) < mask.nbytes + buffers
    assert peak_memory(lambda: add_elements(mask, mask)) < buffers


@pytest.mark.parametrize("num_terms", [1, 2, 63, 64, 65, 300])
def test_products_of_the_largest_numbers_are_exact(num_terms):
    """Coefficients with the largest halves and the largest elements give the largest sums of float64."""
    largest = (PRIME - 1, 0x7FFF8000, 0x7FFF7FFF, 0x00008000, 0x7FFF)
    matrix = [[coefficient] * num_terms for coefficient in largest]
    matrix += [[RANDOM.choice(largest) for _ in range(num_terms)], random_elements(num_terms), [0] * num_terms]
    columns = [[PRIME - 1] * num_terms, [PRIME - 2] * num_terms, random_elements(num_terms)]
    product = prime_field.FieldProduct(matrix)
    product.rows(3)[...] = np.array(columns).T
    output = np.empty((len(matrix), 3), np.uint32)
    product.compute(output)
    assert output.tolist() == [
        [sum(a * b for a, b in zip(row, column, strict=True)) % PRIME for column in columns] for row in matrix
    ]


def test_code_of_many_clients_agrees_with_integers():
    num_needed, num_private = 90, 20
    mask, points = random_elements(141), [*range(1, 50), *range(PRIME - 50, PRIME)]
    shares = encode_mask(elements(mask), num_needed, num_private, points)
    kept = RANDOM.sample(range(len(points)), num_needed)
    decoded = decode_sum({points[i]: shares[i] for i in kept}, num_needed, num_private, 141)
    assert decoded.tolist() == mask


def test_private_shares_agree_with_every_mask():
    """The random pieces contribute an invertible matrix to the shares of any `num_private` points."""
    for num_private, num_pieces in itertools.product(range(1, 5), range(1, 4)):
        points = [*range(1, num_private + 3), RANDOM.randrange(100, PRIME), PRIME - 1]
        rows = [row[num_pieces:] for row in coding_matrix(points, num_pieces + num_private)]
        for subset in itertools.combinations(rows, num_private):
            assert solve(list(subset), [[1]] * num_private) is not None


def test_shares_of_a_mask_of_zeros_are_uniform():
    """Shares of one mask reveal nothing: each bit of the first three shares is set in half of the values."""
    num_columns = 2**16
    mask = torch.zeros(3 * num_columns, dtype=torch.int32)
    first, second = (encode_mask(mask, 6, 3, range(1, 9)) for _ in range(2))
    assert (first == second).sum() < 10
    for share in (*first[:3], first[0] ^ first[1], first[1] ^ first[2]):
        for bit in range(31):
            ones = int(((share >> bit) & 1).sum())
            assert abs(ones - num_columns / 2) < 6 * num_columns**0.5 / 2


def test_field_mask_is_the_key_stream_without_the_word_p():
    """The key 31818 has a word with the lower bits p at position 44112, which occurs once in 2^31 words."""
    key, num_values, rejected = (31818).to_bytes(32, "big"), 2**16 + 7, 44112
    stream = KeyStream(key)
    words = np.frombuffer(bytes(stream.read(2**18)) + bytes(stream.read(32)), "<u4") & 0x7FFFFFFF
    assert words[rejected] == PRIME
    expected = words[: 2**16].tolist()
    expected[rejected] = int(words[2**16])
    assert field_mask(key, num_values).tolist() == expected + words[2**16 + 1 :].tolist()


def test_elements_wrap_around_at_p():
    values, other = random_elements(2**16 + 100), random_elements(2**16 + 100)
    added, subtracted = elements(values), elements(values)
    add_elements(added, elements(other))
    add_elements(subtracted, elements(other), subtract=True)
    assert added.tolist() == [(a + b) % PRIME for a, b in zip(values, other, strict=True)]
    assert subtracted.tolist() == [(a - b) % PRIME for a, b in zip(values, other, strict=True)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), r"shape \(3,\) and dtype torch.int32. It must have shape \(4,\)"),
        (torch.zeros(2, 2, dtype=torch.int32), r"shape \(2, 2\)"),
        (torch.zeros(4, dtype=torch.int64), "dtype torch.int64"),
        (elements([0, 1, -1, PRIME - 1]), "values from -1 to 2147483646"),
        (elements([0, 1, 2, PRIME]), "values from 0 to 2147483647"),
    ],
    ids=["shape", "matrix", "dtype", "negative", "p"],
)
def test_received_values_that_are_no_elements_are_refused(values, message):
    with pytest.raises(EncryptionError, match=f"The share of point 2 has .*{message}"):
        check_elements(values, 4, "The share of point 2")
    with pytest.raises(EncryptionError, match=f"The share of point 2 has .*{message}"):
        decode_sum({1: torch.zeros(4, dtype=torch.int32), 2: values}, 2, 1, 4)


@pytest.mark.parametrize("num_shares", [2, 4])
def test_decoding_refuses_another_number_of_shares(num_shares):
    shares = {point: torch.zeros(4, dtype=torch.int32) for point in range(1, num_shares + 1)}
    with pytest.raises(EncryptionError, match=f"{num_shares} shares of masks arrived, but num_needed=3"):
        decode_sum(shares, 3, 1, 8)


@pytest.mark.parametrize(
    ("num_needed", "num_private", "points", "message"),
    [
        (3, 0, [1, 2, 3], "num_private=0 and num_needed=3 are not allowed for 3 shares"),
        (3, 3, [1, 2, 3], "num_private=3 and num_needed=3 are not allowed"),
        (4, 1, [1, 2, 3], "num_needed=4 are not allowed for 3 shares"),
        (3, 1, [0, 1, 2], "Point 0 of a share is not allowed"),
        (3, 1, [1, 2, PRIME], f"Point {PRIME} of a share is not allowed"),
        (3, 1, [1, 2, 2], r"points \[1, 2, 2\] are not distinct"),
    ],
)
def test_codes_that_reveal_a_mask_or_cannot_be_decoded_are_refused(num_needed, num_private, points, message):
    with pytest.raises(ValueError, match=message):
        encode_mask(torch.zeros(4, dtype=torch.int32), num_needed, num_private, points)


@pytest.mark.parametrize("call", [add_elements, lambda a, b: encode_mask(a, 2, 1, [1, 2])], ids=["add", "encode"])
@pytest.mark.parametrize("values", [torch.zeros(4), torch.zeros(8, dtype=torch.int32)[::2]], ids=["float", "strided"])
def test_other_tensors_are_refused(call, values):
    with pytest.raises(ValueError, match=r"must be contiguous, with shape \(4,\) and dtype torch.int32"):
        call(values, torch.zeros(4, dtype=torch.int32))


def test_code_agrees_with_galois():
    galois = pytest.importorskip("galois", reason="galois is installed for this comparison only")
    field = galois.GF(PRIME)
    mask, points = random_elements(30), range(1, 9)
    shares = encode_mask(elements(mask), 6, 3, points)
    matrix = field(coding_matrix(points, 6))
    pieces = np.linalg.inv(matrix[:6]) @ field(shares[:6].tolist())
    assert pieces[:3].ravel().tolist() == mask
    assert (matrix @ pieces).tolist() == shares.tolist()
