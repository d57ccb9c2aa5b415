"""4-bit groups and largest values: errors against float64 arithmetic, sizes, generation, and invalid tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from decoders import batch, decoder

from hf_federated import SplitModel
from hf_federated.split import Wire
from hf_federated.split.wire import WIRE_DTYPES


# Shapes without and with an incomplete group, byte and quarter.
WIDTHS = [1, 3, 63, 64, 130]


def states_of(width: int, positions: int = 5) -> torch.Tensor:
    """Hidden states whose positions and groups have very different ranges."""
    generator = torch.Generator().manual_seed(width)
    states = torch.randn(1, positions, width, generator=generator)
    return (states + torch.arange(width) // 64) * 10.0 ** torch.arange(-9, positions - 9).view(1, -1, 1)


def restored(dtype: str, states: torch.Tensor) -> torch.Tensor:
    wire = Wire(dtype)
    return wire.decode(wire.encode({"hidden": states}), {"hidden": states})["hidden"]


@pytest.mark.parametrize("width", WIDTHS)
def test_four_bit_values_are_the_nearest_of_16_levels_in_float64(width):
    states = states_of(width)
    actual = restored("int4", states).double()
    for group in range(0, width, 64):
        exact = states[..., group : group + 64].double()
        low, high = exact.amin(dim=-1, keepdim=True), exact.amax(dim=-1, keepdim=True)
        levels = low + (high - low) * torch.arange(16, dtype=torch.float64) / 15  # (1, positions, 16)
        nearest = (exact.unsqueeze(-1) - levels.unsqueeze(-2)).abs().amin(dim=-1)
        error = (actual[..., group : group + 64] - exact).abs()
        # Float32 rounds the range, the levels and the result.
        rounding = 1e-6 * (high - low) + 3e-7 * torch.maximum(low.abs(), high.abs())
        assert (error <= nearest + rounding).all()
        assert (error <= (high - low) / 30 + rounding).all()


def test_four_bit_values_of_a_constant_group_are_exact():
    states = torch.full((2, 3, 100), -7.3)
    assert torch.equal(restored("int4", states), states)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_quarter_of_the_values_is_kept_in_bfloat16(width):
    states = states_of(width)
    actual = restored("topk", states)
    num_kept = math.ceil(width / 4)
    for row, exact in zip(actual.flatten(0, 1), states.flatten(0, 1), strict=True):
        largest = set(sorted(range(width), key=lambda place: -abs(exact[place].item()))[:num_kept])
        expected = [exact[place].bfloat16().item() if place in largest else 0.0 for place in range(width)]
        assert row.tolist() == expected


@pytest.mark.parametrize("width", WIDTHS)
def test_largest_values_of_a_gradient_keep_the_mean_of_its_tokens(width):
    """The mean error is not sent for hidden states. Positions without gradient, such as padding, stay zero."""
    gradient = torch.randn(3, 20, width, generator=torch.Generator().manual_seed(width)) + 0.1
    gradient[1, 15:] = 0
    wire = Wire("topk")
    encoded = wire.encode({"gradient": gradient})
    assert wire.encode({"hidden": gradient}).keys() == {"topk"} and encoded.keys() == {"topk", "mean_error"}
    assert sum(tensor.nbytes for tensor in encoded.values()) == wire.num_bytes({"gradient": (3, 20, width)})
    actual = wire.decode(encoded, {"gradient": gradient})["gradient"]
    assert torch.allclose(actual.double().sum((0, 1)), gradient.double().sum((0, 1)), atol=1e-5)
    assert not actual[1, 15:].any()
    # The kept values alone have another mean.
    assert width < 4 or not torch.allclose(restored("topk", gradient).sum((0, 1)), gradient.sum((0, 1)), atol=1e-1)
    zeros = {"gradient": torch.zeros(1, 2, width)}
    assert not wire.decode(wire.encode(zeros), zeros)["gradient"].any()


@pytest.mark.parametrize("dtype", ["int4", "topk"])
def test_a_position_is_compressed_independently_of_other_positions(dtype):
    """Cached generation, several micro-batches in flight, and batches of several clients depend on this."""
    states = torch.randn(3, 4, 70, generator=torch.Generator().manual_seed(0))
    together = restored(dtype, states)
    for position in range(4):
        assert torch.equal(restored(dtype, states[:, position : position + 1]), together[:, position : position + 1])


@pytest.mark.parametrize("dtype", ["int4", "topk"])
def test_compressed_messages_have_a_sixth_of_the_bytes_of_float32(dtype):
    shapes = {"hidden": (2, 10, 576)}
    assert Wire(dtype).num_bytes(shapes) * 32 == Wire("float32").num_bytes(shapes) * 5
    encoded = Wire(dtype).encode({"hidden": torch.randn(2, 10, 130)})
    assert sum(tensor.nbytes for tensor in encoded.values()) == Wire(dtype).num_bytes({"hidden": (2, 10, 130)})


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_generation_and_loss_with_and_without_cache_are_equal(dtype):
    split = SplitModel.from_model(decoder("llama"), wire_dtype=dtype).eval()
    inputs = batch("left")
    settings = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 8, "do_sample": False}
    cached, uncached = (
        split.generate(inputs["input_ids"], use_cache=use_cache, eos_token_id=None, **settings)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)
    losses = [split(**inputs).loss, decoder("llama").eval()(**inputs).loss]
    assert torch.allclose(*losses, rtol=0.1)


@pytest.mark.parametrize("dtype", ["int4", "topk"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_raise_an_error(dtype, value):
    states = torch.ones(1, 2, 70)
    states[0, 1, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        restored(dtype, states)


Columns = dict[str, torch.Tensor]


def with_columns(dtype: str, encoded: Columns, change: Callable[[Columns], Columns]) -> Columns:
    """Change what the rows of an encoded tensor of width 70 contain, as the table of `Wire.layout` lists it."""
    layouts = {
        "int4": {"scale": (torch.float32, 8), "zero_point": (torch.float32, 8), "values": (torch.uint8, 35)},
        "topk": {"values": (torch.bfloat16, 36), "kept": (torch.uint8, 9)},
    }
    columns, start = {}, 0
    for name, (column_dtype, num_bytes) in layouts[dtype].items():
        columns[name] = encoded[dtype][:, start : start + num_bytes].clone().view(column_dtype)
        start += num_bytes
    assert start == encoded[dtype].shape[1]
    return {**encoded, dtype: torch.cat([column.view(torch.uint8) for column in change(columns).values()], dim=1)}


def filled(columns: Columns, name: str, value: float) -> Columns:
    return {**columns, name: torch.full_like(columns[name], value)}


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        ("int4", lambda sent: sent, None),
        ("int4", lambda sent: filled(sent, "scale", math.inf), "not finite"),
        ("int4", lambda sent: filled(sent, "scale", 3e38), "not finite"),
        ("int4", lambda sent: filled(sent, "zero_point", math.nan), "not finite"),
        (
            "int4",
            lambda sent: {**sent, "scale": sent["scale"][:, :1]},
            "int4 has shape \\(6, 47\\), .* need shape \\(6, 51\\)",
        ),
        ("topk", lambda sent: sent, None),
        ("topk", lambda sent: filled(sent, "values", math.inf), "not finite"),
        ("topk", lambda sent: filled(sent, "kept", 0), "ranges from 0 to 0, .* must have 18 set bits"),
        ("topk", lambda sent: filled(sent, "kept", 255), "ranges from 70 to 70, .* must have 18 set bits"),
        # The bits after the last value do not count.
        ("topk", lambda sent: {**sent, "kept": sent["kept"].roll(1, dims=1)}, "must have 18 set bits"),
        (
            "topk",
            lambda sent: {**sent, "values": sent["values"].float()},
            "topk has shape \\(6, 81\\), .* need shape \\(6, 45\\)",
        ),
    ],
)
def test_invalid_rows_raise_an_error(dtype, change, message):
    states = {"hidden": states_with_largest_values_at_the_end()}
    encoded = Wire(dtype).encode(states)
    changed = with_columns(dtype, encoded, change)
    if message is None:
        assert torch.equal(changed[dtype], encoded[dtype])
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        Wire(dtype).decode(changed, states)


@pytest.mark.parametrize(
    ("dtype", "change", "message"),
    [
        ("int4", lambda sent: {"int4": sent["int4"][:5]}, "5 positions cannot be divided into 2 sequences"),
        ("int4", lambda sent: {"int4": sent["int4"].view(torch.int8)}, "same wire dtype"),
        ("int4", lambda sent: {"topk": sent["int4"]}, "encoded as \\['topk'\\] .* same wire dtype"),
        ("topk", lambda sent: {"int4": sent["topk"]}, "encoded as \\['int4'\\] .* same wire dtype"),
        ("topk", lambda sent: {}, "same wire dtype"),
        ("topk", lambda sent: {**sent, "mean_error": torch.zeros(69)}, "mean_error has shape \\(69,\\), .* \\(70,\\)"),
        ("topk", lambda sent: {**sent, "mean_error": torch.full((70,), math.nan)}, "not finite"),
        ("topk", lambda sent: {**sent, "mean_error": torch.zeros(70).half()}, "same wire dtype"),
        ("int4", lambda sent: {**sent, "mean_error": torch.zeros(70)}, "same wire dtype"),
    ],
)
def test_invalid_compressed_tensors_raise_an_error(dtype, change, message):
    states = {"hidden": states_with_largest_values_at_the_end()}
    encoded = Wire(dtype).encode(states)
    Wire(dtype).decode(encoded, states)
    with pytest.raises(ValueError, match=message):
        Wire(dtype).decode(change(encoded), states)


def states_with_largest_values_at_the_end() -> torch.Tensor:
    states = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0))
    states[..., -6:] += 10
    return states


@pytest.mark.parametrize("dtype", ["int8", "int4", "topk"])
@pytest.mark.parametrize("hidden_size", [1, 3, 64, 70])
def test_rows_of_one_position_are_decoded(hidden_size, dtype):
    """The columns of a single row are contiguous, but not aligned."""
    states = torch.randn(1, 1, hidden_size)
    many = torch.cat([states, torch.randn(1, 4, hidden_size)], dim=1)
    assert torch.equal(restored(dtype, states)[0, 0], restored(dtype, many)[0, 0])
