"""Values that the annotations of a message's fields do not allow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

import pytest
import torch

from hf_federated.messages import KINDS, ClientUpdate, Fit, Message, Predict, read_message
from hf_federated.utils.fields import (
    MAX_COUNT,
    MAX_METRICS,
    MaxEntries,
    Range,
    Requirement,
    ShareOrCount,
    TensorOf,
    check_fields,
    check_of,
)


UPDATE = ClientUpdate(0, "a", {"w": torch.zeros(2)}, num_examples=1, num_tokens=0, num_steps=1)
FIT = Fit(0, "a", seed=1, state={})
DEEP: Any = 0
for _ in range(30):
    DEEP = [DEEP]

INVALID = [
    ("num_examples", 10**400, "is an integer of more than 64 bits"),
    ("num_examples", 2**70, "is an integer of more than 64 bits"),
    ("num_examples", MAX_COUNT + 1, "is 9007199254740993, expected a number between 0 and"),
    ("num_examples", -1, "is -1, expected a number between 0 and"),
    ("num_examples", math.nan, "is a value of type float, expected int"),
    ("num_examples", 1.0, "is a value of type float, expected int"),
    ("num_examples", True, "is a value of type bool, expected int"),
    ("num_examples", None, "is None, expected int"),
    ("num_steps", "100", "is a value of type str, expected int"),
    ("num_tokens", [], "is a value of type list, expected int"),
    ("round", -1, "is -1, expected"),
    ("client_id", 7, "is a value of type int, expected str"),
    ("nonce", None, "is None, expected str"),
    ("client_id", "a\ud800", "is not valid Unicode"),
    ("metrics", {"\ud800": 1.0}, "has a key that is not valid Unicode"),
    ("state", None, "is None, expected dict"),
    ("state", [torch.zeros(1)], "is a value of type list, expected dict"),
    ("state", {"w": 1.0}, "has a value that is invalid: 'w' is a value of type float, expected a tensor"),
    ("state", {0: torch.zeros(1)}, "has a key that is a value of type int, expected str"),
    ("state", {"w": torch.zeros(2, 2).to_sparse()}, "expected a tensor"),
    ("extra", {"n" * 1001: torch.zeros(1)}, "has a key of 1001 characters"),
    ("metrics", None, "is None, expected dict"),
    ("metrics", {"loss": "0.1"}, "'loss' is a value of type str, expected float"),
    ("metrics", {"loss": True}, "'loss' is a value of type bool, expected float"),
    ("metrics", {"loss": 10**400}, "'loss' is an integer of more than 64 bits"),
    ("metrics", {f"m{i}": 0.0 for i in range(MAX_METRICS + 1)}, "has 10001 entries, at most 10000"),
]


@pytest.mark.parametrize(("name", "value", "expected"), INVALID, ids=[f"{item[0]}-{item[2][:24]}" for item in INVALID])
def test_value_that_a_field_does_not_allow_is_named(name, value, expected):
    check_fields(UPDATE)
    with pytest.raises(ValueError, match=f"^`{name}` ") as error:
        check_fields(dataclasses.replace(UPDATE, **{name: value}))
    assert expected in str(error.value) and len(str(error.value)) < 1500


@pytest.mark.parametrize(
    "value", [{"lr": "\ud800"}, {"lr": object()}, {"lr": {1: 2}}, {"lr": torch.zeros(1)}, {"a": DEEP}]
)
def test_settings_are_values_of_json(value):
    check_fields(dataclasses.replace(FIT, settings={"lr": [0.1, None, "x", {"deep": True}]}))
    with pytest.raises(ValueError, match="^`settings` "):
        check_fields(dataclasses.replace(FIT, settings=value))


def test_loss_of_a_diverged_client_is_an_allowed_value():
    check_fields(dataclasses.replace(UPDATE, metrics={"loss": math.nan, "grad_norm": math.inf, "epoch": 1}))


def test_optional_field_may_be_none():
    predict = Predict(0, "a", order=None, start=0, stop=1, seed=0)
    check_fields(predict)
    check_fields(dataclasses.replace(predict, order=3))
    with pytest.raises(ValueError, match="`order` is a value of type str, expected int"):
        check_fields(dataclasses.replace(predict, order="3"))


def test_reader_checks_the_fields():
    blob = dataclasses.replace(UPDATE, num_examples=True).to_bytes()
    with pytest.raises(
        ValueError, match="'client_update' has an invalid field: `num_examples` is a value of type bool"
    ):
        read_message(blob)


@dataclass(frozen=True)
class Own(Message):
    kind: ClassVar[str] = "own"

    share: Annotated[float, Range(0, 1)]
    names: Annotated[list[str], MaxEntries(2)]
    shape: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "changes",
    [{"share": 1.5}, {"share": math.nan}, {"names": ["a"] * 3}, {"names": [1]}, {"names": ("a",)}, {"shape": [1]}],
    ids=str,
)
def test_message_of_a_user_declares_its_ranges(changes):
    own = Own(0, "a", 0.5, ["x"], (1, 2))
    check_fields(own)
    with pytest.raises(ValueError):
        check_fields(dataclasses.replace(own, **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_annotations_of_every_message_are_understood(kind):
    cls = KINDS[kind]
    nothing = cls(**dict.fromkeys((item.name for item in dataclasses.fields(cls)), object()))
    with pytest.raises(ValueError, match="expected"):
        check_fields(nothing)


class Strategy(Enum):
    NO = "no"
    STEPS = "steps"


@pytest.mark.parametrize(
    ("annotation", "valid", "invalid", "problem"),
    [
        (ShareOrCount, [1, 0.5], True, "is a value of type bool, expected float"),
        (Sequence[str], [["a"], ("a",), []], "a", "is a value of type str, expected list"),
        (Literal["bfloat16", "float16"], ["float16"], "load", "must be bfloat16 or float16, but is 'load'"),
        (Literal[False] | str | None, [False, "x", None], 0, "must be False, but is 0"),
        (Strategy | str, ["no", "steps"], "epoch", "must be no or steps, but is 'epoch'"),
        (Annotated[bool, Requirement("must be True or False")], [True], 1, "must be True or False, but is 1"),
        (
            Annotated[torch.Tensor, TensorOf(torch.uint8, ndim=1)],
            [torch.zeros(2, dtype=torch.uint8)],
            torch.zeros(2),
            "must be torch.uint8 with 1 dimensions, but is a tensor of torch.float32, shape (2,)",
        ),
    ],
    ids=str,
)
def test_check_of_an_annotation_allows_its_values_only(annotation, valid, invalid, problem):
    check = check_of(annotation)
    assert [check(value) for value in valid] == [None] * len(valid)
    assert check(invalid) == problem
