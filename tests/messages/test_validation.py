"""What the server refuses, in words that name the client, the round, the key and what was expected."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_federated.messages import ClientUpdate
from hf_federated.messages.validation import InvalidUpdateError, check_update, first_non_finite


REFERENCE = {
    "embedding": torch.zeros(3, 2),
    "half": torch.zeros(2, dtype=torch.bfloat16),
    "count": torch.tensor(4),
    "empty": torch.zeros(0),
}
EXTRA = {"embedding": torch.zeros(3, 2)}


def update(**changes):
    """A good update in round 2 with some keys of its state changed."""
    state = {name: value.clone() for name, value in {**REFERENCE, **changes}.items()}
    return ClientUpdate(2, "north", state, num_examples=1, num_tokens=0, num_steps=1, extra=dict(EXTRA))


def refusal(bad: ClientUpdate) -> str:
    with pytest.raises(InvalidUpdateError) as error:
        check_update(bad, 2, REFERENCE, EXTRA)
    text = str(error.value)
    assert text.startswith("Client 'north', round 2")
    return text


def test_a_good_update_is_accepted():
    check_update(update(), 2, REFERENCE, EXTRA)


def test_the_order_of_keys_does_not_matter():
    good = update()
    reversed_state = dict(reversed(good.state.items()))
    check_update(dataclasses.replace(good, state=reversed_state), 2, REFERENCE, EXTRA)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["embedding", "half"])
def test_a_single_non_finite_value_is_refused_by_key(name, bad):
    value = REFERENCE[name].clone()
    value.view(-1)[-1] = bad
    text = refusal(update(**{name: value}))
    assert f"{name!r} holds NaN or infinite values, expected finite ones" in text


def test_huge_finite_values_are_accepted():
    huge = torch.tensor([[3e38, -3e38], [3.4028234e38, -3.4028234e38], [1e-45, -0.0]])
    assert huge.isfinite().all() and not (huge * huge).isfinite().all()  # a sum of squares would overflow
    half = torch.tensor([3e38, -3e38], dtype=torch.bfloat16)
    check_update(update(embedding=huge, half=half), 2, REFERENCE, EXTRA)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_largest_number_of_a_dtype_is_finite_and_the_next_is_not(dtype):
    largest = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
    assert first_non_finite({"a": largest, "b": -largest}) is None
    assert first_non_finite({"a": largest, "b": largest * 2}) == "b"


def test_the_first_bad_key_is_named():
    bad = torch.tensor([1.0, float("nan")])
    assert first_non_finite({"a": torch.ones(2), "b": bad, "c": bad}) == "b"
    assert first_non_finite({"count": torch.tensor(1), "empty": torch.zeros(0)}) is None
    assert first_non_finite({}) is None


def test_a_missing_key_is_named():
    bad = update()
    state = {name: value for name, value in bad.state.items() if name not in ("half", "count")}
    assert "2 keys are missing, the first is 'half'" in refusal(dataclasses.replace(bad, state=state))


def test_an_unexpected_key_is_named():
    assert "1 keys were not asked for, the first is 'adapter'" in refusal(update(adapter=torch.ones(1)))


def test_a_renamed_key_is_reported_from_both_sides():
    bad = update(renamed=torch.zeros(2))
    state = {name: value for name, value in bad.state.items() if name != "half"}
    text = refusal(dataclasses.replace(bad, state=state))
    assert "the first is 'half'" in text and "the first is 'renamed'" in text


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 3, 2), (3, 1), ()], ids=str)
def test_another_shape_is_refused_with_the_expected_one(shape):
    text = refusal(update(embedding=torch.zeros(shape)))
    assert f"'embedding' has shape {shape}, expected (3, 2)" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64], ids=str)
def test_another_dtype_is_refused_with_the_expected_one(dtype):
    text = refusal(update(embedding=torch.zeros(3, 2, dtype=dtype)))
    assert f"'embedding' is {dtype}, expected torch.float32" in text


def test_an_answer_to_another_round_is_refused():
    assert "the update answers round 1" in refusal(dataclasses.replace(update(), round=1))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, "1 keys are missing, the first is 'embedding'"),
        ({**EXTRA, "rows": torch.ones(1)}, "1 keys were not asked for, the first is 'rows'"),
        ({"embedding": torch.zeros(3)}, "'embedding' has shape (3,), expected (3, 2)"),
        ({"embedding": torch.full((3, 2), float("nan"))}, "'embedding' holds NaN"),
    ],
    ids=["missing", "unexpected", "shape", "nan"],
)
def test_what_comes_beside_the_parameters_is_checked_too(extra, expected):
    text = refusal(dataclasses.replace(update(), extra=extra))
    assert "beside the parameters" in text and expected in text


@pytest.mark.parametrize("value", [None, "0.1", [0.1]])
def test_a_metric_that_is_no_number_is_refused_by_name(value):
    bad = dataclasses.replace(update(), metrics={"loss": 0.5, "min_epoch_loss": value})
    assert f"the metric 'min_epoch_loss' is {value!r}, expected a number" in refusal(bad)
