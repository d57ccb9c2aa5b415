"""Rejected updates, with errors that name the client, the round, the key and the expected value."""

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
    """Return a valid update in round 2, with changed tensors in its state."""
    state = {name: value.clone() for name, value in {**REFERENCE, **changes}.items()}
    return ClientUpdate(2, "north", state, num_examples=1, num_tokens=0, num_steps=1, extra=dict(EXTRA))


def rejection_message(bad: ClientUpdate) -> str:
    with pytest.raises(InvalidUpdateError) as error:
        check_update(bad, 2, REFERENCE, EXTRA)
    text = str(error.value)
    assert text.startswith("Client 'north', round 3")
    return text


def test_valid_update_is_accepted():
    check_update(update(), 2, REFERENCE, EXTRA)


def test_order_of_keys_does_not_matter():
    good = update()
    reversed_state = dict(reversed(good.state.items()))
    check_update(dataclasses.replace(good, state=reversed_state), 2, REFERENCE, EXTRA)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["embedding", "half"])
def test_one_non_finite_value_is_rejected_with_its_key(name, bad):
    value = REFERENCE[name].clone()
    value.view(-1)[-1] = bad
    text = rejection_message(update(**{name: value}))
    assert f"{name!r} holds NaN or infinite values, expected finite values" in text


def test_huge_finite_values_are_accepted():
    huge = torch.tensor([[3e38, -3e38], [3.4028234e38, -3.4028234e38], [1e-45, -0.0]])
    assert huge.isfinite().all() and not (huge * huge).isfinite().all()  # a sum of squares would overflow
    half = torch.tensor([3e38, -3e38], dtype=torch.bfloat16)
    check_update(update(embedding=huge, half=half), 2, REFERENCE, EXTRA)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_largest_number_of_a_dtype_is_finite(dtype):
    largest = torch.full((5,), torch.finfo(dtype).max, dtype=dtype)
    assert first_non_finite({"a": largest, "b": -largest}) is None
    assert first_non_finite({"a": largest, "b": largest * 2}) == "b"


def test_first_non_finite_tensor_is_named():
    bad = torch.tensor([1.0, float("nan")])
    assert first_non_finite({"a": torch.ones(2), "b": bad, "c": bad}) == "b"
    assert first_non_finite({"count": torch.tensor(1), "empty": torch.zeros(0)}) is None
    assert first_non_finite({}) is None


def test_missing_key_is_named():
    bad = update()
    state = {name: value for name, value in bad.state.items() if name not in ("half", "count")}
    assert "2 keys are missing, the first is 'half'" in rejection_message(dataclasses.replace(bad, state=state))


def test_unexpected_key_is_named():
    assert "1 keys are unexpected, the first is 'adapter'" in rejection_message(update(adapter=torch.ones(1)))


def test_renamed_key_is_reported_as_missing_and_unexpected():
    bad = update(renamed=torch.zeros(2))
    state = {name: value for name, value in bad.state.items() if name != "half"}
    text = rejection_message(dataclasses.replace(bad, state=state))
    assert "the first is 'half'" in text and "the first is 'renamed'" in text


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 3, 2), (3, 1), ()], ids=str)
def test_wrong_shape_is_rejected_with_the_expected_shape(shape):
    text = rejection_message(update(embedding=torch.zeros(shape)))
    assert f"'embedding' has shape {shape}, expected (3, 2)" in text


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64], ids=str)
def test_wrong_dtype_is_rejected_with_the_expected_dtype(dtype):
    text = rejection_message(update(embedding=torch.zeros(3, 2, dtype=dtype)))
    assert f"'embedding' is {dtype}, expected torch.float32" in text


def test_reply_to_another_round_is_rejected():
    assert "the update is a reply to round 2" in rejection_message(dataclasses.replace(update(), round=1))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, "1 keys are missing, the first is 'embedding'"),
        ({**EXTRA, "rows": torch.ones(1)}, "1 keys are unexpected, the first is 'rows'"),
        ({"embedding": torch.zeros(3)}, "'embedding' has shape (3,), expected (3, 2)"),
        ({"embedding": torch.full((3, 2), float("nan"))}, "'embedding' holds NaN"),
    ],
    ids=["missing", "unexpected", "shape", "nan"],
)
def test_additional_tensors_are_checked(extra, expected):
    text = rejection_message(dataclasses.replace(update(), extra=extra))
    assert "additional tensors" in text and expected in text


@pytest.mark.parametrize("value", [None, "0.1", [0.1]])
def test_metric_that_is_not_a_number_is_rejected_with_its_name(value):
    bad = dataclasses.replace(update(), metrics={"loss": 0.5, "min_epoch_loss": value})
    assert f"the metric 'min_epoch_loss' is {value!r}, expected a number" in rejection_message(bad)
