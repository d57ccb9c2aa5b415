"""`is_finite` finds each value that is not finite, and accepts finite values whose sum overflows."""

from __future__ import annotations

import math

import pytest
import torch

from hf_federated.messages.validation import first_non_finite
from hf_federated.utils.finite_values import is_finite


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("invalid", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]], ids=repr)
def test_invalid_values_are_found(invalid, others, dtype):
    for position in (0, 70, 198):
        values = torch.full((200,), others, dtype=dtype)
        values[position : position + len(invalid)] = torch.tensor(invalid, dtype=dtype)
        assert not is_finite(values.view(4, 50))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_finite_values_whose_sum_overflows_are_finite(sign, dtype):
    values = torch.full((200,), sign * torch.finfo(dtype).max, dtype=dtype)
    assert not values.sum().isfinite() and is_finite(values)


def test_an_empty_tensor_is_finite():
    assert is_finite(torch.zeros(0, 3))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_8_bit_floats_are_checked(dtype):
    assert is_finite(torch.ones(3).to(dtype))
    assert not is_finite(torch.tensor([1.0, math.nan]).to(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_first_tensor_that_is_not_finite_is_named(dtype):
    state = {name: torch.ones(3).to(dtype) for name in ("a", "b", "c")}
    assert first_non_finite(state) is None
    assert first_non_finite({**state, "b": torch.tensor([1.0, math.nan]).to(dtype)}) == "b"
