"""Messages and their serialization: exact round trips, sizes known in advance, and rejection of invalid blobs."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import pickle
import sys
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch

import hf_federated
from hf_federated.messages import (
    KINDS,
    ClientFailure,
    ClientUpdate,
    Distill,
    Evaluate,
    Feedback,
    Fit,
    Message,
    Metrics,
    Predict,
    Predictions,
    kinds_of,
    message_from_tree,
    read_message,
)
from hf_federated.messages.serialization import TREE_KEY, FlatTree, pack, packed_size, unpack


STATE = {"layer.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "layer.bias": torch.tensor([-0.0, 1e-30])}

MESSAGES: list[Message] = [
    Fit(3, "north", 2**32 - 1, STATE, extra={"layer.bias": torch.ones(2)}, settings={"weight": 0.1, "on": True}),
    Fit(0, "", 0, {}),
    Fit(1, "own model", 7, {}, returns_state=False),
    Fit(4, "north", 7, STATE, accepted_round=2),
    Predict(2, "north", None, 0, 4, 9),
    Predict(2, "north", 2**32 - 1, 4, 8, 9, keeps_graph=True),
    Predictions(2, "north", {"values": torch.tensor([[1.5, -2.0]])}),
    Distill(2, "north", None, 0, 1, 9, {"values": torch.ones(1, 2)}, 3, 60, settings={"weight": 0.5}),
    Feedback(2, "north", 5, 0, 1, 9, {"values": torch.ones(1, 2)}, {"values": torch.zeros(1, 2)}, 7, 60),
    ClientUpdate(3, "süd\n", STATE, 10, 0, 5, metrics={"loss": 0.5, "grad_norm": float("inf")}, extra=STATE),
    Evaluate(1, "north", STATE),
    Metrics(1, "north", 7, {"eval_loss": float("nan"), "eval_accuracy": 1.0}),
    ClientFailure(2, "north", "RuntimeError: 'out of memory' \x00 €"),
]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def assert_same(a: Any, b: Any) -> None:
    """Assert that trees have equal types and key orders, and tensors that are equal bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert list(a) == list(b) or any(isinstance(key, float) and math.isnan(key) for key in a)
        for left, right in zip(a.values(), b.values(), strict=True):
            assert_same(left, right)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert repr(a) == repr(b)  # NaN equals NaN, and 1 differs from True


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_message_survives_serialization(message):
    blob = message.to_bytes()
    for copy in (read_message(blob), type(message).from_bytes(blob)):
        assert type(copy) is type(message)
        for item in dataclasses.fields(message):
            assert_same(getattr(copy, item.name), getattr(message, item.name))
        assert copy.to_bytes() == blob


def test_field_with_the_accepted_round_is_sent_only_if_set():
    """The messages of other runs keep their bytes."""
    assert "accepted_round" not in Fit(3, "north", 7, STATE).to_tree()["fields"]
    assert Fit.from_bytes(Fit(3, "north", 7, STATE).to_bytes()).accepted_round is None
    assert Fit(3, "north", 7, STATE, accepted_round=0).to_tree()["fields"]["accepted_round"] == 0


def test_all_message_kinds_are_tested():
    assert {type(message) for message in MESSAGES} == set(KINDS.values())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_num_bytes_is_the_serialized_length(message):
    assert message.num_bytes == len(message.to_bytes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_survive_and_have_the_computed_size(dtype):
    raw = torch.arange(48, dtype=torch.uint8)
    full = raw % 2 == 0 if dtype is torch.bool else raw.view(dtype)
    tree = {"full": full, "empty": full[:0], "scalar": full[0], "matrix": full[:2].reshape(1, 2, 1)}
    blob = pack(tree)
    assert_same(unpack(blob), tree)
    assert packed_size(tree) == len(blob)


def test_computed_size_of_many_tensors_of_mixed_dtypes_is_right():
    # More than ten tensors, so that the names have a different order as text than as numbers.
    tree = {f"name {i} é": torch.zeros(i, dtype=DTYPES[i % len(DTYPES)]) for i in range(40)}
    assert packed_size(tree) == len(pack(tree))


@pytest.mark.parametrize("second", DTYPES, ids=str)
@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_computed_size_is_right_for_every_order_of_dtypes(first, second):
    # The header contains offsets as text. A large tensor before many small tensors makes the header longer.
    tree = [torch.zeros(2, dtype=first) for _ in range(20)] + [torch.zeros(5000, dtype=second)]
    assert packed_size(tree) == len(pack(tree))


@pytest.mark.parametrize(
    "tree",
    [
        None,
        True,
        3,
        2**80,
        "text",
        [],
        (),
        {},
        {0: "a", -1: "b", None: "c", True: "d", 1.5: "e", (1, "x"): "f", "g": "h"},
        {"$tensor": "0", "$pairs": 1, "$float": 2, "$tuple": []},
        {"": {"": [{"a": ((), ((1,),), [()])}]}},
        [float("nan"), float("inf"), -float("inf"), -0.0, 1e-320, 0.1],
        {float("inf"): 1},
        {"text": '\x00\x1f\x7f\\"/\u2028\U0001f600', "\x00\x7f\u2029": 1},
        {"betas": (0.9, 0.999), "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2)}}},
    ],
    ids=lambda tree: repr(tree)[:30],
)
def test_unusual_trees_survive_and_have_the_computed_size(tree):
    blob = pack(tree)
    assert_same(unpack(blob), tree)
    assert packed_size(tree) == len(blob)


@pytest.mark.parametrize("value", [0.1, float("inf"), float("-inf"), float("nan")])
def test_numpy_float_becomes_python_float(value):
    assert_same(unpack(pack({"metric": np.float64(value)})), {"metric": value})


def test_shared_tensor_is_serialized_once_and_stays_shared():
    weight = torch.zeros(1000)
    tree = {"embedding": weight, "head": weight}
    blob = pack(tree)
    assert len(blob) < 4000 + 300
    assert packed_size(tree) == len(blob)
    copy = unpack(blob)
    assert copy["embedding"] is copy["head"]


def test_views_are_serialized_with_their_values():
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "whole": base,
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.T,
        "tail": base.reshape(-1)[10:],
        "expanded": torch.tensor([1.5]).expand(4),
    }
    blob = pack(tree)
    assert_same(unpack(blob), tree)
    assert packed_size(tree) == len(blob)


def test_view_is_serialized_without_its_storage():
    assert len(pack(torch.zeros(100_000)[:2])) < 200


def test_parameters_are_serialized_without_gradients():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 7.0)
    assert_same(unpack(pack(parameter)), torch.ones(2))


def test_pack_does_not_change_the_tree():
    tree = {"a": torch.ones(2), "b": {1: (torch.zeros(1),)}}
    tensors = (tree["a"], tree["b"][1][0])
    pack(tree)
    assert (tree["a"], tree["b"][1][0]) == tensors and list(tree) == ["a", "b"]


def test_unpacked_tensors_are_writable_copies():
    blob = pack({"a": torch.zeros(2)})
    unpack(blob)["a"].add_(1)
    assert_same(unpack(blob)["a"], torch.zeros(2))


@pytest.mark.parametrize(
    "tree",
    [{"model": {"set": [0, {1}]}}, {"model": {"set": [0, object()]}}, {"model": {"set": [0, b"bytes"]}}],
    ids=["set", "object", "bytes"],
)
def test_value_that_cannot_be_serialized_is_named_with_its_path(tree):
    for function in (pack, packed_size):
        with pytest.raises(TypeError, match=r"\.model\.set\[1\] is a (set|object|bytes), which cannot be serialized"):
            function(tree)


def test_unsupported_dtype_is_named_with_its_path():
    for function in (pack, packed_size):
        with pytest.raises(TypeError, match=r"\.weight is a tensor of torch\.complex128"):
            function({"weight": torch.zeros(1, dtype=torch.complex128)})


# ---- Invalid blobs


@pytest.mark.parametrize("content", ['"aa"', '"xy"', '"3ff8000000000000ff"', "1.5", "null"])
def test_damaged_number_is_rejected(content):
    blob = safetensors.torch.save({}, {TREE_KEY: f'{{"$float":{content}}}'})
    with pytest.raises(ValueError, match="Not a packed tree"):
        unpack(blob)


def test_size_of_a_message_does_not_depend_on_its_numbers():
    def size(loss):
        return Metrics(0, "a", num_examples=1, metrics={"loss": loss}).num_bytes

    assert size(0.5) == size(0.123456789012345) == size(-1e-300) == size(float("nan"))


def test_truncated_blob_is_rejected():
    blob = MESSAGES[0].to_bytes()
    for length in range(len(blob)):
        with pytest.raises(ValueError, match="Not a packed tree"):
            unpack(blob[:length])


def test_blob_with_trailing_bytes_is_rejected():
    with pytest.raises(ValueError, match="Not a packed tree"):
        unpack(MESSAGES[0].to_bytes() + b"\0")


@pytest.mark.parametrize("position", range(0, 40))
def test_damaged_header_raises_only_value_errors(position):
    blob = bytearray(MESSAGES[0].to_bytes())
    blob[position] ^= 0xFF
    with pytest.raises(ValueError):
        read_message(bytes(blob))


@pytest.mark.parametrize(
    "skeleton",
    [
        "",
        "[1",
        '{"$tensor":"7"}',
        '{"$tensor":[]}',
        '{"$float":"x"}',
        '{"$float":[]}',
        '{"$pairs":3}',
        '{"$pairs":[[[],1]]}',
        '{"$tuple":3}',
        "[" * 100_000 + "]" * 100_000,
    ],
    ids=lambda skeleton: skeleton[:20],
)
def test_header_without_a_valid_tree_is_rejected(skeleton):
    blob = safetensors.torch.save({"0": torch.zeros(1)}, {"tree": skeleton})
    with pytest.raises(ValueError, match="Not a packed tree"):
        unpack(blob)


def test_other_safetensors_file_is_rejected():
    with pytest.raises(ValueError, match="Not a packed tree"):
        unpack(safetensors.torch.save({"weight": torch.zeros(1)}, {"format": "pt"}))


class UnpicklingDetector:
    """Records that it was unpickled."""

    was_unpickled = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        UnpicklingDetector.was_unpickled = True


def test_pickle_is_rejected_and_not_executed(tmp_path):
    detector = UnpicklingDetector()
    detector.content = "content"  # type: ignore[attr-defined]
    torch.save({"state": detector}, tmp_path / "saved.pt")
    for blob in (pickle.dumps(detector), pickle.dumps(detector, protocol=0), (tmp_path / "saved.pt").read_bytes()):
        for read in (unpack, read_message, Fit.from_bytes):
            with pytest.raises(ValueError):
                read(blob)
    assert not UnpicklingDetector.was_unpickled
    pickle.loads(pickle.dumps(detector))
    assert UnpicklingDetector.was_unpickled  # the detector itself works


def refuses_pickle(call: ast.Call) -> bool:
    """Whether ``call`` is ``np.load(…, allow_pickle=False)``."""
    options = {word.arg: word.value for word in call.keywords}
    value = options.get("allow_pickle")
    return isinstance(value, ast.Constant) and value.value is False and ast.unparse(call.func) == "np.load"


def test_package_uses_no_pickle():
    forbidden_modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    forbidden_calls = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}
    found = []
    for path in sorted(Path(hf_federated.__file__).parent.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        without_pickle = {id(node.func) for node in nodes if isinstance(node, ast.Call) and refuses_pickle(node)}
        for node in nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            is_forbidden = any(name.split(".")[0] in forbidden_modules for name in names)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_forbidden = (node.value.id, node.attr) in forbidden_calls and id(node) not in without_pickle
            if is_forbidden:
                found.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
    assert not found


# ---- Trees that are not messages


def test_another_kind_is_rejected_with_its_name():
    with pytest.raises(ValueError, match="Expected a message of kind 'fit', got kind 'evaluate'"):
        Fit.from_bytes(Evaluate(0, "a", {}).to_bytes())


def test_unknown_kind_is_rejected_with_the_known_kinds():
    with pytest.raises(ValueError, match=r"Unknown message kind 'gossip'; known kinds are \['client_failure'"):
        read_message(pack({"kind": "gossip", "fields": {}}))


@pytest.mark.parametrize("tree", [3, "fit", [], {}, {"kind": None}, {"kind": []}, {"fields": {}}], ids=repr)
def test_tree_that_is_not_a_message_is_rejected(tree):
    with pytest.raises(ValueError, match="Unknown message kind"):
        read_message(pack(tree))
    with pytest.raises(ValueError, match="Expected a message of kind 'fit'"):
        Fit.from_bytes(pack(tree))


@pytest.mark.parametrize("fields", [None, 3, [], "round"], ids=repr)
def test_message_without_fields_is_rejected(fields):
    for read in (read_message, Metrics.from_bytes):
        with pytest.raises(ValueError, match="A message of kind 'metrics' has the fields"):
            read(pack({"kind": "metrics", "fields": fields}))


def test_missing_and_additional_fields_are_rejected_with_their_names():
    fields = {"round": 0, "client_id": "a", "num_examples": 1, "metrics": {}}
    for invalid_fields in ({**fields, "rows": []}, {key: value for key, value in fields.items() if key != "metrics"}):
        blob = pack({"kind": "metrics", "fields": invalid_fields})
        with pytest.raises(ValueError, match="A message of kind 'metrics' has the fields") as error:
            read_message(blob)
        assert str(list(invalid_fields)) in str(error.value)


def test_messages_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MESSAGES[0].round = 9  # type: ignore[attr-defined]


def test_blob_is_a_valid_safetensors_file():
    blob = MESSAGES[0].to_bytes()
    tensors = safetensors.torch.load(blob)
    assert sorted(tuple(tensor.shape) for tensor in tensors.values()) == [(2,), (2,), (2, 3)]
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    assert json.loads(header["__metadata__"]["tree"])["kind"] == "fit"


@pytest.mark.parametrize(
    "changes",
    [
        {"client_id": "a" * 9},
        {"client_id": 'quotes " and \\ and é'},
        {"num_examples": 10**12},
        {"metrics": {"loss": float("nan")}},
        {"metrics": {"loss": 0.25, "other": 3}},
        {"state": {"w": torch.zeros(2, 3), "v": torch.zeros(7)}},
        {"state": {"w": torch.zeros(2, 4)}},
        {"state": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}},
        {"extra": {"w": torch.zeros(2, 3)}},
        {"extra": {"$w": torch.zeros(2, 3)}},
    ],
)
def test_the_size_of_a_message_is_right_after_one_of_similar_structure(changes):
    """The size of a structure is computed once; every part of the structure must be part of its key."""
    first = ClientUpdate(0, "b", {"w": torch.ones(2, 3)}, num_examples=1, num_tokens=2, num_steps=3)
    second = dataclasses.replace(first, **changes)
    for message in (first, second, first):
        assert message.num_bytes == len(message.to_bytes())


@dataclass(frozen=True, slots=True)
class WithSlots(Message):
    kind: ClassVar[str] = "with_slots"

    value: int = 0


def test_message_with_another_nonce_is_a_copy():
    first = Fit(1, "a", 2, {"w": torch.ones(2)}, nonce="1")
    for message in (first, WithSlots(1, "a", 7, nonce="1")):
        changed = message.with_nonce("2")
        assert type(changed) is type(message) and changed.nonce == "2" and message.nonce == "1"
        assert changed == dataclasses.replace(message, nonce="2") != message
    assert first.with_nonce("2").state is first.state


class Word(str):
    """A text of another class."""


class Mask(torch.Tensor):
    """A tensor of another class."""


class Level(IntEnum):
    """A number of another class."""

    HIGH = 1000


class Name(str, Enum):
    """A text of another class, whose name is not its value."""

    LONG = "a long text"


def test_the_size_of_a_tree_is_right_after_one_that_is_similar():
    trees = [
        {Word("a"): 1, Word("b"): torch.ones(2)},
        {Word("$a"): 1, Word("b"): torch.ones(2)},
        {"a": torch.ones(2), "b": torch.ones(3)},
        {"a": torch.ones(3).as_subclass(Mask), "b": torch.ones(2).as_subclass(Mask)},
        {"a": torch.ones(1, 2), "b": [torch.ones(3)]},
        {"a": [torch.ones(2), torch.ones(3)]},
        {"a": [torch.ones(2)], "b": torch.ones(3)},
        [{"a": torch.ones(2)}, {"b": torch.ones(3)}],
        [{"a": torch.ones(2), "b": torch.ones(3)}, {}],
        {1: "a", 2: True},
        {True: "a", 2: 1},
        {(1,): "a", 2: 1},
        {(True,): "a", 2: 1},
        {1.0: "a", 2: None},
        ["a", 1],
        ("a", 1),
        ["aa"],
        [10, None, 'x"x', "\\", "é"],
        [],
        {},
        FlatTree(a=1, b="2"),
        {"a": 1, "b": "2"},
        {"a": {"b": 1}, "c": 2},
        {"a": {"b": 1, "c": 2}},
        {"a": 0.5, "b": 1},
        {"a": 1, "b": 0.5},
        *(
            [value]
            for value in (None, "", 0, False, True, 0.0, -(2**70), "\x7f\n\ud800", Word('"'), Level.HIGH, Name.LONG)
        ),
    ]
    for tree in [*trees, *reversed(trees)]:
        assert packed_size(tree) == len(pack(tree))


@pytest.mark.parametrize("kind", ["fit", "client_update"])
def test_computing_the_size_of_a_known_message_needs_few_calls(kind):
    """The ledger needs the size of every message of a round."""

    def message(number: int) -> Message:
        state = {f"layer {i}": torch.zeros(3, i) for i in range(100)}
        if kind == "fit":
            return Fit(
                number, f"client {number}", number, state, extra=state, settings={"proximal_weight": 0.5 * number}
            )
        metrics = {"loss": float(number), "grad_norm": 1.0, "learning_rate": 1e-3}
        return ClientUpdate(number, f"client {number}", state, number, 0, 5, metrics=metrics)

    first, second = message(9), message(10)
    assert first.num_bytes == len(first.to_bytes())
    calls: list[str] = []
    package = str(Path(hf_federated.__file__).parent)

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls.append(frame.f_code.co_name)

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        num_bytes = second.num_bytes
    finally:
        sys.setprofile(previous)
    assert num_bytes == len(second.to_bytes())
    assert 0 < len(calls) <= 6, calls


def test_shared_tensors_count_once_in_the_size():
    shared = torch.ones(5)
    twice = ClientUpdate(0, "b", {"w": shared, "v": shared}, num_examples=1, num_tokens=2, num_steps=3)
    apart = dataclasses.replace(twice, state={"w": shared, "v": shared.clone()})
    across = dataclasses.replace(twice, state={"w": shared}, extra={"v": shared})
    for message in (twice, apart, across, twice):
        assert message.num_bytes == len(message.to_bytes())


@dataclass(frozen=True)
class Interval(Message):
    """A message whose constructor computes with its fields."""

    kind: ClassVar[str] = "interval"

    low: float
    high: float

    def __post_init__(self) -> None:
        if self.high - self.low < 0:
            raise ValueError("the interval is empty")


def test_constructor_of_a_message_receives_only_values_of_its_annotations():
    """The constructor of a user may raise any error for a value of another type, which would end the server."""
    tree = Interval(0, "north", 1.0, 2.0).to_tree()
    assert message_from_tree(tree, kinds_of(Interval)) == Interval(0, "north", 1.0, 2.0)
    tree["fields"]["high"] = "2.0"
    with pytest.raises(ValueError, match="'interval' has an invalid field: `high` is a value of type str"):
        read_message(pack(tree), kinds_of(Interval))
