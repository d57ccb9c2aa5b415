"""Keys, masks and sealed messages of secure aggregation, compared with computations in plain Python."""

from __future__ import annotations

import hashlib
import hmac
import os

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from hf_federated.security import masks
from hf_federated.security.keys import EncryptionError
from hf_federated.security.masks import add_mask, derive_key, open_sealed, seal, shared_secret


INTEGERS = {torch.int32: 4, torch.int16: 2}


def key_stream(key: bytes, num_bytes: int) -> bytes:
    """The encrypted numbers 0, 1, 2, …, which is the definition of the counter mode."""
    counters = b"".join(block.to_bytes(16, "big") for block in range(-(-num_bytes // 16)))
    return Cipher(AES(key), ECB()).encryptor().update(counters)[:num_bytes]


def masked_in_python(values: torch.Tensor, key: bytes, sign: int) -> list[int]:
    width = INTEGERS[values.dtype]
    stream = key_stream(key, width * len(values))
    numbers = [int.from_bytes(stream[i : i + width], "little") for i in range(0, len(stream), width)]
    modulus = 256**width
    sums = [(value + sign * number) % modulus for value, number in zip(values.tolist(), numbers, strict=True)]
    return [value - modulus if value >= modulus // 2 else value for value in sums]


def random_vector(dtype: torch.dtype, num_values: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(os.urandom(INTEGERS[dtype] * num_values)), dtype=dtype)


@pytest.mark.parametrize("subtract", [False, True], ids=["add", "subtract"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("num_values", [1, 3, 4, 1000, 2**17 + 5])
def test_mask_is_the_key_stream_added_with_wrapping(dtype, num_values, subtract):
    values, key = random_vector(dtype, num_values), os.urandom(32)
    expected = masked_in_python(values, key, -1 if subtract else 1)
    assert add_mask(values, key, subtract) is None
    assert values.tolist() == expected


def test_mask_of_an_empty_vector_is_empty():
    values = torch.empty(0, dtype=torch.int32)
    add_mask(values, bytes(32))
    assert values.tolist() == []


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_masks_of_pairs_cancel_in_the_sum(dtype):
    vectors = [random_vector(dtype, 70_001) for _ in range(3)]
    expected = vectors[0] + vectors[1] + vectors[2]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        key = os.urandom(32)
        add_mask(vectors[first], key)
        add_mask(vectors[second], key, subtract=True)
    assert torch.equal(vectors[0] + vectors[1] + vectors[2], expected)


def test_masks_of_two_keys_and_of_all_pieces_differ():
    """A mask that repeats after a piece would reveal differences of values."""
    keys = os.urandom(32), os.urandom(32)
    first, second = (torch.zeros(2**18, dtype=torch.int32) for _ in keys)
    add_mask(first, keys[0])
    add_mask(second, keys[1])
    for one, other in ((first, second), (first[: 2**16], first[2**16 : 2**17])):
        assert (one == other).sum() < 10


def test_masked_zeros_are_uniform():
    """Each bit is set in half of the values, within six standard deviations."""
    num_values = 2**20
    values = torch.zeros(num_values, dtype=torch.int32)
    add_mask(values, os.urandom(32))
    for bit in range(32):
        ones = int(((values >> bit) & 1).sum())
        assert abs(ones - num_values / 2) < 6 * num_values**0.5 / 2


def test_mask_allocates_no_second_vector(peak_memory):
    values = torch.ones(2**24, dtype=torch.int32)
    assert peak_memory(lambda: add_mask(values, bytes(32))) < values.nbytes / 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(4), "dtype torch.float32"),
        (torch.zeros(4, dtype=torch.int64), "dtype torch.int64"),
        (torch.zeros(2, 2, dtype=torch.int32), r"shape \(2, 2\)"),
        (torch.zeros(4, dtype=torch.int32, device="meta"), "on meta"),
        (torch.zeros(4, dtype=torch.int32)[::2], "contiguous vector"),
    ],
    ids=["float", "int64", "matrix", "device", "strided"],
)
def test_mask_refuses_other_tensors(values, message):
    with pytest.raises(ValueError, match=message):
        add_mask(values, bytes(32))


def test_two_clients_compute_the_same_secret():
    (north, north_public), (south, south_public) = masks.generate_exchange_key(), masks.generate_exchange_key()
    assert shared_secret(north, south_public) == shared_secret(south, north_public)
    assert masks.public_of(north) == north_public and len(north_public) == 32
    assert north != south and north_public != south_public


def test_exchange_agrees_with_the_vectors_of_the_standard():
    """RFC 7748, section 6.1."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    secret = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert shared_secret(alice, masks.public_of(bob)) == shared_secret(bob, masks.public_of(alice)) == secret


@pytest.mark.parametrize("public", [bytes(32), b"\1" + bytes(31)], ids=["zero", "one"])
def test_public_key_of_small_order_is_refused(public):
    with pytest.raises(EncryptionError, match="gives the same secret with each private key"):
        shared_secret(os.urandom(32), public)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_keys_of_another_length_are_refused(length):
    key, other = bytes(length), os.urandom(32)
    calls = (
        lambda: masks.public_of(key),
        lambda: shared_secret(key, masks.public_of(other)),
        lambda: shared_secret(other, key),
        lambda: add_mask(torch.zeros(1, dtype=torch.int32), key),
        lambda: seal(key, b"", b""),
        lambda: open_sealed(key, bytes(28), b""),
    )
    for call in calls:
        with pytest.raises(EncryptionError, match=f"has {length} bytes. It must have 32 bytes"):
            call()


def test_derived_key_is_the_key_of_the_standard():
    """RFC 5869 with a salt of zeros: one block of the expansion."""
    secret, context = os.urandom(32), b"session"
    pseudorandom = hmac.digest(bytes(32), secret, hashlib.sha256)
    info = b"hf-federated secure aggregation 1" + b"\0\0\0\4pair" + context
    assert derive_key(secret, "pair", context) == hmac.digest(pseudorandom, info + b"\1", hashlib.sha256)


def test_derived_keys_differ_by_secret_purpose_and_context():
    secret = bytes(32)
    keys = {
        derive_key(secret, "pair", b"x"),
        derive_key(secret, "pai", b"rx"),
        derive_key(secret, "pairx", b""),
        derive_key(secret, "self", b"x"),
        derive_key(secret, "pair", b"y"),
        derive_key(b"\1" + secret[1:], "pair", b"x"),
    }
    assert len(keys) == 6


def test_sealed_message_opens_with_the_same_key_and_data_only():
    key, message = os.urandom(32), os.urandom(100)
    blob = seal(key, message, b"north to south")
    assert open_sealed(key, blob, b"north to south") == message
    assert len(blob) == len(message) + 28
    assert blob != seal(key, message, b"north to south")
    for wrong in ((os.urandom(32), blob, b"north to south"), (key, blob, b"south to north"), (key, blob, b"")):
        with pytest.raises(EncryptionError, match="not authentic"):
            open_sealed(*wrong)


def test_changed_and_truncated_sealed_messages_are_refused():
    key = os.urandom(32)
    blob = seal(key, b"share", b"")
    for position in range(len(blob)):
        changed = blob[:position] + bytes([blob[position] ^ 1]) + blob[position + 1 :]
        with pytest.raises(EncryptionError, match="not authentic"):
            open_sealed(key, changed, b"")
    for length in range(len(blob)):
        with pytest.raises(EncryptionError, match="truncated"):
            open_sealed(key, blob[:length], b"")
    with pytest.raises(EncryptionError, match="not authentic"):
        open_sealed(key, blob + b"\0", b"")
