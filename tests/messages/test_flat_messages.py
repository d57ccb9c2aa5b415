"""Flat trees have a short header, and flat messages send no field that has its default value."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import safetensors.torch
import torch

from hf_federated.messages import FlatMessage, read_message
from hf_federated.messages.serialization import FlatTree, PackedPieces, pack, packed_kind, packed_size, unpack
from hf_federated.split.messages import read_request


@dataclass(frozen=True)
class Sample(FlatMessage):
    kind: ClassVar[str] = "sample"

    name: str
    count: int
    states: dict[str, torch.Tensor]
    mask: torch.Tensor | None = None
    scale: float | None = None
    note: str | None = None
    last: bool = False


STATES = {"values": torch.arange(6.0).view(2, 3), "mean": torch.ones(3)}
SAMPLES = [
    Sample("a", 3, {"values": torch.ones(2, 2)}),
    Sample("", 0, STATES, torch.ones(3, dtype=torch.uint8), 0.1, "x\"'{}\n\u00e9", True),
    Sample("a.b", 2**63, STATES, scale=math.inf),
]


def write(tensors: dict[str, torch.Tensor], **scalars: object) -> bytes:
    """Write a flat message without the package."""
    return safetensors.torch.save(tensors, {name: json.dumps(value) for name, value in scalars.items()})


@pytest.mark.parametrize("sample", SAMPLES, ids=["short", "full", "some"])
@pytest.mark.parametrize("form", [bytes, lambda blob: memoryview(bytearray(blob))], ids=["bytes", "view"])
def test_a_message_is_read_as_it_was_written(form, sample):
    blob = sample.to_bytes()
    read = Sample.from_bytes(form(blob))
    for item in dataclasses.fields(Sample):
        actual, expected = getattr(read, item.name), getattr(sample, item.name)
        if isinstance(expected, dict):
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[key], expected[key]) for key in expected)
        elif isinstance(expected, torch.Tensor):
            assert torch.equal(actual, expected)
        else:
            assert actual == expected and type(actual) is type(expected)
    assert len(blob) == sample.num_bytes == packed_size(sample.to_tree())
    assert b"".join(sample.to_pieces()) == blob and packed_kind(blob) == "sample"


def test_sizes_are_computed_for_other_scalars_and_other_forms():
    tree = {"kind": "sample", "values": torch.ones(2)}
    for changed in ({}, {"note": "a"}, {"note": 'ab"'}, {"count": 7}, {"count": 1234567}, {"scale": 0.5}):
        for form in (dict, FlatTree):
            blob = pack(form({**tree, **changed}))
            assert len(blob) == packed_size(form({**tree, **changed})) == len(PackedPieces(form({**tree, **changed})))


def test_safetensors_reads_a_message():
    tensors = safetensors.torch.load(SAMPLES[1].to_bytes())
    assert tensors.keys() == {"states.values", "states.mean", "mask"}
    assert torch.equal(tensors["states.values"], STATES["values"])


def test_fields_with_their_default_are_not_sent():
    assert unpack(SAMPLES[0].to_bytes()).keys() == {"kind", "name", "count", "states.values"}
    assert unpack(SAMPLES[1].to_bytes()).keys() > {"mask", "scale", "note", "last"}
    explicit = write({"states.values": torch.ones(2, 2)}, kind="sample", name="a", count=3, last=False, note=None)
    assert Sample.from_bytes(explicit).last is False


@pytest.mark.parametrize(
    ("blob", "error"),
    [
        (write({"states.values": torch.ones(1)}, kind="sample", name="a"), "has the fields"),
        (write({"states.values": torch.ones(1)}, kind="other", name="a", count=1), "got kind 'other'"),
        (write({"states.values": torch.ones(1)}, name="a", count=1), "got kind '<NoneType>'"),
        (write({"states.values": torch.ones(1), "kind": torch.ones(1)}, name="a", count=1), "got kind '<Tensor>'"),
        (write({"states.values": torch.ones(1)}, kind="sample", name="a", count=1, labels=[1]), "labels"),
        (
            write({"states.values": torch.ones(1), "labels.a": torch.ones(1)}, kind="sample", name="a", count=1),
            "labels",
        ),
        (
            write({"states.values": torch.ones(1), "states": torch.ones(1)}, kind="sample", name="a", count=1),
            "two values",
        ),
        (write({"states.values": torch.ones(1)}, kind="sample", name="a", count=1, states={}), "two values"),
        (write({"states": torch.ones(1)}, kind="sample", name="a", count=1), "`states` is .* expected dict"),
        (write({"states.values": torch.ones(1)}, kind="sample", name=["a"], count=1), "`name` is .* expected str"),
        (write({"states.values": torch.ones(1), "count": torch.ones(1)}, kind="sample", name="a"), "`count` is"),
        (write({"states.values": torch.ones(1), "name": torch.ones(1)}, kind="sample", name="a", count=1), "damaged"),
        (safetensors.torch.save({"states.values": torch.ones(1)}, {"kind": "sample"}), "damaged"),
        (safetensors.torch.save({"states.values": torch.ones(1)}), "damaged"),
        (
            pack({"kind": "sample", "fields": {"name": "a", "count": 1, "states": {}}}),
            "must be a flat tree. Use the same version",
        ),
        (pack({"kind": "sample", "name": "a", "count": 1, "states": {}}), "must be a flat tree. Use the same version"),
        (pack([1]), "got kind '<list>'"),
    ],
)
@pytest.mark.parametrize("form", [bytes, lambda blob: memoryview(bytearray(blob))], ids=["bytes", "view"])
def test_a_changed_message_is_an_error(form, blob, error):
    with pytest.raises(ValueError, match=error):
        Sample.from_bytes(form(blob))


@pytest.mark.parametrize("metadata", [[], "tree", 3, None, {"kind": 3}, {"kind": "{"}, {"kind": "[" * 10**5}], ids=str)
def test_damaged_metadata_is_an_error(metadata):
    check_damaged(json.dumps({"__metadata__": metadata}))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_text_that_is_not_utf8_is_an_error(encoding):
    check_damaged(json.dumps({"__metadata__": {"kind": '"sample"'}}), encoding)


def check_damaged(header: str, encoding: str = "utf-8") -> None:
    """Check that a file with this header is refused, as bytes and as a view."""
    while len(header.encode(encoding)) % 8 and len(header) < 2 * 10**5:
        header += " "
    encoded = header.encode(encoding)
    blob = len(encoded).to_bytes(8, "little") + encoded
    for form in (blob, memoryview(bytearray(blob))):
        with pytest.raises(ValueError, match="damaged"):
            unpack(form)
        assert packed_kind(form) is None


def test_kind_that_is_a_tensor_is_an_error():
    blob = pack({"kind": torch.zeros([1] * 64), "fields": {}})
    with pytest.raises(ValueError, match="got kind '<Tensor>'"):
        Sample.from_bytes(blob)
    with pytest.raises(ValueError, match="got kind '<Tensor>'"):
        read_request(blob)
    with pytest.raises(ValueError, match="Unknown message kind '<Tensor>'"):
        read_message(blob)


@pytest.mark.parametrize("form", [bytes, lambda blob: memoryview(bytearray(blob))], ids=["bytes", "view"])
def test_tensor_with_more_dimensions_than_numpy_supports_is_an_error(form):
    with pytest.raises(ValueError, match="'0' has 65 dimensions, at most 64 are allowed"):
        unpack(form(pack([torch.zeros([1] * 65)])))


def test_kind_among_pairs_is_found():
    pairs = {"tree": json.dumps({"$pairs": [["kind", "sample"], ["$a", 1]]})}
    blob = safetensors.torch.save({"a": torch.ones(1)}, pairs)
    assert packed_kind(blob) == unpack(blob)["kind"] == "sample"


@pytest.mark.parametrize("value", [{}, [1], (1,), {"a": torch.ones(1)}], ids=str)
def test_a_flat_tree_contains_only_scalars_and_tensors(value):
    with pytest.raises(TypeError, match="A flat tree cannot contain the .* 'a'"):
        pack(FlatTree(a=value))


@pytest.mark.parametrize("key", ["tree", "__metadata__", "$tensor", 3])
def test_a_flat_tree_has_no_reserved_keys(key):
    with pytest.raises(TypeError, match="A flat tree cannot contain"):
        pack(FlatTree({key: 1}))


def test_unsupported_values_of_a_flat_tree_are_named():
    with pytest.raises(TypeError, match="a is a set, which cannot be serialized"):
        pack(FlatTree(a={1}))
    with pytest.raises(TypeError, match="a is a tensor of torch.complex128"):
        pack(FlatTree(a=torch.ones(1, dtype=torch.complex128)))
