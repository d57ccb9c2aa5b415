"""Codecs of the exchange: values against float64 arithmetic, sizes, error feedback, and tensors of another layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_federated.codecs import EXCHANGE_CODECS, Float32, Int4, Int8, PowerSGD, TopK


# Scalars, empty tensors, one incomplete block, several blocks with an incomplete last one, and a convolution.
SHAPES = [(), (0,), (3, 0), (1,), (63,), (255,), (256,), (257,), (40, 33), (5, 4, 3, 3)]
CODECS = [Int8(), Int4(), TopK(0.1), TopK(0.01), PowerSGD(1), PowerSGD(3), Float32()]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values whose blocks have very different ranges."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (values * 10.0 ** (torch.arange(values.numel()).view(shape) // 100 % 7 - 3)).to(dtype)


def matrix_of_rank(rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(60, rank, generator=generator), torch.randn(rank, 50, generator=generator)
    return left @ torch.diag(2.0 ** -torch.arange(rank)) @ right


# ---- Values


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_the_nearest_multiples_of_the_scale_of_a_block(codec, shape):
    value = tensor_of(shape)
    decoded = codec.decode(codec.encode({"w": value}), {"w": value})["w"]
    assert decoded.shape == shape
    flat, found = value.double().numpy().reshape(-1), decoded.double().numpy().reshape(-1)
    for start in range(0, flat.size, 256):
        block = flat[start : start + 256]
        scale = abs(block).max() / (127 if codec.bits == 8 else 7)
        np.testing.assert_allclose(found[start : start + 256], np.rint(block / scale) * scale, rtol=1e-5, atol=0)


@pytest.mark.parametrize("share", [0.5, 0.1, 0.01, 1e-9])
@pytest.mark.parametrize("shape", [*SHAPES[3:], (300, 300)], ids=str)
def test_top_k_keeps_the_values_with_the_largest_magnitudes(share, shape):
    """The places are bits or indices, and tensors of more than 65536 values have longer indices."""
    codec, value = TopK(share), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    decoded = codec.decode(codec.encode({"w": value}), {"w": value})["w"]
    flat = value.double().numpy().reshape(-1)
    num_kept = max(1, math.ceil(share * flat.size - 1e-9))
    expected = np.zeros_like(flat)
    kept = np.argsort(-abs(flat), kind="stable")[:num_kept]
    expected[kept] = flat[kept]
    # bfloat16 has 8 bits of precision.
    np.testing.assert_allclose(decoded.double().numpy().reshape(-1), expected, rtol=2**-8, atol=0)
    assert np.count_nonzero(decoded) == num_kept


def test_power_sgd_is_one_step_of_a_power_iteration_that_continues_in_the_next_call():
    codec, memory, start = PowerSGD(2), {}, None
    for seed in range(3):
        matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(seed))
        packed = codec.compress_next({"w": matrix}, memory)["w"].double().numpy()
        left, right = packed[:80].reshape(40, 2), packed[80:].reshape(30, 2)
        np.testing.assert_allclose(left.T @ left, np.eye(2), atol=1e-6)
        np.testing.assert_allclose(right, matrix.double().numpy().T @ left, rtol=0, atol=1e-5)
        if start is not None:
            expected = np.linalg.qr(matrix.double().numpy() @ start)[0]
            np.testing.assert_allclose(abs(left.T @ expected), np.eye(2), atol=1e-5)
        start = right


def test_warm_start_reaches_the_best_approximation_of_its_rank():
    """A cold start stays at the error of one step of the power iteration."""
    codec, memory, matrix = PowerSGD(2), {}, {"w": matrix_of_rank(8)}
    singular = np.linalg.svd(matrix["w"].double().numpy(), compute_uv=False)
    best = np.sqrt((singular[2:] ** 2).sum())
    for _ in range(12):
        encoded = codec.compress_next(matrix, memory)
    warm, cold = (
        float((codec.decode(each, matrix)["w"] - matrix["w"]).norm()) for each in (encoded, codec.compress(matrix))
    )
    assert warm == pytest.approx(best, rel=1e-3) and cold > 1.05 * best


@pytest.mark.parametrize("rank", [1, 3])
def test_matrix_of_the_rank_of_the_factors_is_exact(rank):
    codec, matrix = PowerSGD(rank), {"w": matrix_of_rank(rank)}
    torch.testing.assert_close(codec.decode(codec.encode(matrix), matrix), matrix, rtol=0, atol=1e-5)


def test_power_sgd_recovers_after_a_matrix_of_zeros():
    codec, memory, matrix = PowerSGD(1), {}, {"w": matrix_of_rank(1)}
    assert not codec.decode(codec.compress_next({"w": torch.zeros(60, 50)}, memory), matrix)["w"].any()
    for _ in range(2):
        encoded = codec.compress_next(matrix, memory)
    torch.testing.assert_close(codec.decode(encoded, matrix), matrix, rtol=0, atol=1e-5)


@pytest.mark.parametrize("codec", [TopK(1.0), Float32()], ids=repr)
def test_codecs_that_lose_nothing_return_the_same_bytes(codec):
    tensors = {str(shape): tensor_of(shape) for shape in SHAPES}
    decoded = codec.decode(codec.encode(tensors), tensors)
    assert codec.is_exact and all(torch.equal(decoded[name], value) for name, value in tensors.items())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_encoded_tensors_have_the_announced_layout(codec):
    tensors = {str(shape): tensor_of(shape) for shape in [*SHAPES, (300, 300)]}
    shapes = {name: value.shape for name, value in tensors.items()}
    for memory in (None, {}):
        encoded = codec.encode(tensors, memory)
        assert {name: (value.dtype, tuple(value.shape)) for name, value in encoded.items()} == codec.layout(shapes)
        assert sum(value.nbytes for value in encoded.values()) == codec.num_bytes(shapes)


@pytest.mark.parametrize(("codec", "ratio"), [(Int8(), 3.93), (Int4(), 7.75), (TopK(0.1), 12), (TopK(0.01), 66)])
def test_large_tensors_take_a_fraction_of_the_bytes(codec, ratio):
    assert 4 * 768 * 1024 / codec.num_bytes({"w": (768, 1024)}) > ratio
    assert 4 * 768 * 8 / codec.num_bytes({"w": (768, 8)}) > ratio


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_recognizable(codec, value):
    tensors = {"w": torch.zeros(30, 20)}
    tensors["w"][10, 5] = value
    assert not codec.decode(codec.encode(tensors), tensors)["w"].isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_encoded_tensors_do_not_share_memory_with_a_model(codec):
    tensors = {name: tensor_of(shape) for name, shape in {"matrix": (40, 33), "bias": (3,)}.items()}
    encoded = codec.encode(tensors)
    kept = {name: value.clone() for name, value in encoded.items()}
    for value in tensors.values():
        value.zero_()
    assert all(torch.equal(encoded[name], value) for name, value in kept.items())


# ---- Error feedback


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_sum_of_sent_changes_is_the_sum_of_changes_without_the_last_error(codec):
    shapes = {"matrix": (40, 33), "row": (300,), "scalar": ()}
    memory: dict = {}
    true, sent = ({name: np.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for seed in range(20):
        change = {
            name: torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for name, shape in shapes.items()
        }
        decoded = codec.decode(codec.encode(change, memory), change)
        for name in shapes:
            true[name] += change[name].double().numpy()
            sent[name] += decoded[name].double().numpy()
    for name in shapes:
        expected = true[name] - memory["residual"][name].double().numpy()
        np.testing.assert_allclose(sent[name], expected, rtol=0, atol=1e-6 * max(1.0, abs(true[name]).max()))


# ---- Untrusted tensors


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ({}, r"hold \[\]; .* sends \['w'\] for 1 tensors"),
        ({"w": torch.zeros(3, dtype=torch.float16)}, r"'w' of encoded tensors is torch.float16 of shape \(3,\)"),
        ({"w": torch.zeros(3, dtype=torch.uint8)}, r"shape \(3,\); .* sends .* of shape"),
        ({"w": 3}, "'w' of encoded tensors is a int"),
        (None, "Encoded tensors are a NoneType; expected a mapping of tensors"),
    ],
)
def test_another_layout_is_refused_before_memory_is_allocated(codec, encoded, message):
    """The tensor that the receiver expects would need 4 TB."""
    with pytest.raises(ValueError, match=message):
        codec.decode(encoded, {"w": torch.empty(10**6, 10**6, device="meta")})


def places_of(codec: TopK, num_values: int, change) -> dict[str, torch.Tensor]:
    """Encoded values of which the bytes of the places are changed."""
    encoded = codec.encode({"w": torch.arange(1.0, num_values + 1)})
    num_kept = math.ceil(codec.share * num_values)
    change(encoded["w"][2 * num_kept :])
    return encoded


@pytest.mark.parametrize(
    ("share", "num_values", "change"),
    [
        (0.1, 400, lambda bits: bits.fill_(255)),
        (0.1, 400, lambda bits: bits.zero_()),
        (0.01, 1000, lambda indices: indices.zero_()),
        (0.01, 1000, lambda indices: indices.view(torch.int16).copy_(torch.arange(10).flip(0))),
        (0.01, 1000, lambda indices: indices.view(torch.int16)[-1:].fill_(1000)),
        (0.01, 1000, lambda indices: indices.view(torch.int16)[:1].fill_(-1)),
        (0.001, 70000, lambda indices: indices[-4:].fill_(255)),
    ],
)
def test_wrong_places_are_refused(share, num_values, change):
    codec = TopK(share)
    encoded = places_of(codec, num_values, change)
    with pytest.raises(ValueError, match=f"'w' of encoded tensors has wrong places; .* below {num_values}"):
        codec.decode(encoded, {"w": torch.empty(num_values)})


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_share_must_be_above_0_and_at_most_1(share):
    with pytest.raises(ValueError, match=f"`share` is {share}; it must be above 0 and at most 1"):
        TopK(share)


def test_rank_must_be_positive():
    with pytest.raises(ValueError, match="`rank` is 0; it must be at least 1"):
        PowerSGD(0)


def test_each_name_builds_its_codec():
    assert {name: type(cls()) for name, cls in EXCHANGE_CODECS.items()} == {
        "int8": Int8,
        "int4": Int4,
        "topk": TopK,
        "powersgd": PowerSGD,
    }
