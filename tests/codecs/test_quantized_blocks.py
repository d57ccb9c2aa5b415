"""Quantized blocks: errors against float64 arithmetic, sizes, error feedback, and tensors of another layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_federated.codecs import QuantizedBlocks


# Scalars, empty tensors, one incomplete block, several blocks with an incomplete last one, and a convolution.
SHAPES = [(), (0,), (3, 0), (1,), (63,), (255,), (256,), (257,), (40, 33), (5, 4, 3, 3)]


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values whose blocks have very different ranges."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (values * 10.0 ** (torch.arange(values.numel()).view(shape) // 100 - 3)).to(dtype)


def largest_errors(value: torch.Tensor, bits: int) -> np.ndarray:
    """Return half of a step of the quantization for each value, from float64 arithmetic."""
    flat = value.double().numpy().reshape(-1)
    group, num_steps = (256, 255) if bits == 8 else (64, 15)
    bounds = np.empty_like(flat)
    for start in range(0, flat.size, group):
        part = flat[start : start + group]
        rounding = 1e-6 * (part.max() - part.min()) + 3e-7 * abs(part).max()
        bounds[start : start + group] = (part.max() - part.min()) / num_steps / 2 + rounding
    return bounds.reshape(value.shape)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_the_nearest_levels_of_their_block(shape, bits):
    codec, tensors = QuantizedBlocks(bits), {"w": tensor_of(shape)}
    encoded = codec.encode(tensors)
    decoded = codec.decode(encoded, tensors)["w"]
    assert decoded.shape == shape
    assert (abs(decoded.double().numpy() - tensors["w"].double().numpy()) <= largest_errors(tensors["w"], bits)).all()
    assert sum(value.nbytes for value in encoded.values()) == codec.num_bytes({"w": shape})


@pytest.mark.parametrize(("bits", "ratio"), [(8, 32 / 8.25), (4, 32 / 5)])
def test_large_tensors_take_8_or_5_bits_for_each_value(bits, ratio):
    assert 4 * 768 * 1024 / QuantizedBlocks(bits).num_bytes({"w": (768, 1024)}) == ratio
    # Rows of eight values, as in a low-rank adapter, need no scale each.
    assert 4 * 768 * 8 / QuantizedBlocks(bits).num_bytes({"w": (768, 8)}) == ratio


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_floating_dtypes_are_quantized_as_float32(dtype):
    value = tensor_of((300,)).to(dtype)
    expected = QuantizedBlocks().encode({"w": value.float()})["w"]
    assert torch.equal(QuantizedBlocks().encode({"w": value})["w"], expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_recognizable(bits, value):
    codec, tensors = QuantizedBlocks(bits), {"w": torch.zeros(600)}
    tensors["w"][300] = value
    decoded = codec.decode(codec.encode(tensors), tensors)["w"]
    assert not decoded[300].isfinite()
    assert decoded[:256].isfinite().all() and decoded[512:].isfinite().all()


def test_error_feedback_sends_later_what_was_lost():
    """Without feedback, each of the 20 sums loses the same part of a value."""
    codec, memory = QuantizedBlocks(4), {}
    change = {"w": torch.randn(500, generator=torch.Generator().manual_seed(0)), "b": torch.tensor([1.0, 0.3, 0.0])}
    with_feedback, without = ({name: torch.zeros_like(value) for name, value in change.items()} for _ in range(2))
    for _ in range(20):
        for total, kept in ((with_feedback, memory), (without, None)):
            for name, value in codec.decode(codec.encode(change, kept), change).items():
                total[name] += value
    for name, value in change.items():
        torch.testing.assert_close(with_feedback[name] + memory["residual"][name], 20 * value, rtol=0, atol=1e-4)
        # A step of the quantization bounds the residual.
        step = (value.max() - value.min()) / 15
        assert memory["residual"][name].abs().max() < step
        assert (with_feedback[name] - 20 * value).abs().max() < step
        assert (without[name] - 20 * value).abs().max() > 4 * step


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ({}, r"hold \[\]; QuantizedBlocks\(bits=8\) sends \['w'\] for 1 tensors"),
        ({"w": torch.zeros(2, 264)}, r"'w' of encoded tensors is torch.float32 of shape \(2, 264\); .* torch.uint8"),
        ({"w": torch.zeros(1, 264, dtype=torch.uint8)}, r"shape \(1, 264\); .* sends torch.uint8 of shape \(2, 264\)"),
        ({"w": 3}, "'w' of encoded tensors is a int"),
        (None, "Encoded tensors are a NoneType; expected a mapping of tensors"),
    ],
)
def test_another_layout_is_refused(encoded, message):
    with pytest.raises(ValueError, match=message):
        QuantizedBlocks().decode(encoded, {"w": torch.zeros(2, 256)})


def test_bits_must_be_8_or_4():
    with pytest.raises(ValueError, match="`bits` is 2; it must be 8 or 4"):
        QuantizedBlocks(2)
