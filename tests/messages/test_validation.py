"""Rejected updates, with errors that name the client, the round, the key and the expected value."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_federated.messages import ClientFailure, ClientUpdate, Fit, Metrics
from hf_federated.messages.validation import (
    ExpectedReply,
    InvalidUpdateError,
    UpdateLimits,
    check_claims,
    check_update,
    first_non_finite,
)


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
        check_update(bad, REFERENCE, EXTRA)
    text = str(error.value)
    assert text.startswith("Client 'north', round 3")
    return text


def test_valid_update_is_accepted():
    check_update(update(), REFERENCE, EXTRA)


def test_order_of_keys_does_not_matter():
    good = update()
    reversed_state = dict(reversed(good.state.items()))
    check_update(dataclasses.replace(good, state=reversed_state), REFERENCE, EXTRA)


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
    check_update(update(embedding=huge, half=half), REFERENCE, EXTRA)


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


# ---- Claims of an update


LIMITS = UpdateLimits(num_examples=10, num_steps=20, num_tokens=300)


@pytest.mark.parametrize(("name", "limit"), [item for item in vars(LIMITS).items() if item[1] is not None])
def test_update_claims_at_most_what_the_client_announced(name, limit):
    good = ClientUpdate(2, "north", {}, num_examples=1, num_tokens=0, num_steps=1)
    check_claims(dataclasses.replace(good, **{name: limit}), LIMITS)
    check_claims(dataclasses.replace(good, **{name: 10**12}), UpdateLimits())
    noun = name.removeprefix("num_")
    with pytest.raises(InvalidUpdateError, match=rf"^Client 'north', round 3: .*{limit + 1} {noun}.* most {limit}\.$"):
        check_claims(dataclasses.replace(good, **{name: limit + 1}), LIMITS)


@pytest.mark.parametrize("changes", [{"num_examples": 0}, {"num_steps": 0}], ids=str)
def test_update_without_data_is_rejected(changes):
    with pytest.raises(InvalidUpdateError, match="at least one example and one step"):
        check_claims(dataclasses.replace(update(), **changes), LIMITS)


# ---- Replies


REQUEST = Fit(2, "north", seed=0, state={}, nonce="0123")
REPLY = dataclasses.replace(update(), nonce="0123")


def test_reply_to_the_request_is_accepted():
    ExpectedReply.to(REQUEST).check(REPLY)
    ExpectedReply.to(REQUEST).check(ClientFailure(2, "north", "OSError", nonce="0123"))


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (None, "it is a NoneType, expected a message"),
        (b"garbage", "it is a bytes, expected a message"),
        (Metrics(2, "north", 1, {}, nonce="0123"), "it is a 'metrics', expected a 'client_update'"),
        (dataclasses.replace(REPLY, client_id="south"), "in the name of client 'south'"),
        (dataclasses.replace(REPLY, client_id="s" * 999), "in the name of client '" + "s" * 100 + "'"),
        (dataclasses.replace(REPLY, round=1), "it belongs to round 2"),
        (dataclasses.replace(REPLY, nonce="0124"), "does not contain the nonce of the request"),
        (dataclasses.replace(REPLY, nonce=""), "does not contain the nonce of the request"),
        (dataclasses.replace(REPLY, num_examples=None), "`num_examples` is None, expected int"),
    ],
    ids=["nothing", "bytes", "kind", "client", "long name", "round", "old nonce", "no nonce", "field"],
)
def test_reply_that_does_not_answer_the_request_is_refused(reply, expected):
    with pytest.raises(ValueError, match=expected):
        ExpectedReply.to(REQUEST).check(reply)
