"""A message that arrives in a writable buffer is read without a copy, and only if safetensors accepts its bytes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch

from hf_federated.messages import ClientUpdate, read_message
from hf_federated.messages.serialization import TREE_KEY, FlatTree, pack, unpack
from hf_federated.transport.protocol import CHUNK_BYTES, join_chunks, split_into_chunks


SHARED = torch.arange(6.0)
TREES = {
    "scalars": {"a": 1, "b": math.nan, "c": (1, [True])},
    "dtypes": {
        str(dtype): torch.ones(3, 5).to(dtype)
        for dtype in (torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    },
    "shapes": {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "large": torch.randn(700, 900)},
    "shared": {"first": SHARED, "second": SHARED, "view": SHARED[2:]},
}


def writable(blob, offset=0):
    """Return an aligned and writable view of a copy of the bytes, moved by `offset` bytes."""
    buffer = np.empty(len(blob) + offset, np.uint8).data
    buffer[offset:] = blob
    return buffer[offset:]


def with_header(entries, data, padding=8):
    """Return a safetensors file with these entries, whose tree names the tensor `"a"`."""
    header = {"__metadata__": {TREE_KEY: json.dumps({"$tensor": "a"})}, **entries}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // padding) * padding)
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("name", TREES)
def test_every_tree_is_read_from_a_view(name):
    blob = pack(TREES[name])
    assert pack(unpack(writable(blob))) == pack(unpack(blob)) == blob


def test_tensors_share_the_memory_of_the_view():
    view = writable(pack({"first": torch.arange(5), "second": torch.ones(3, dtype=torch.int32)}))
    tree = unpack(view)
    before = bytes(view)
    tree["second"].zero_()
    assert bytes(view) != before
    assert unpack(bytes(view))["second"].tolist() == [0, 0, 0]


def test_a_view_that_is_read_only_is_copied(recwarn):
    view = memoryview(pack({"values": torch.ones(3)}))
    unpack(view)["values"].zero_()
    assert unpack(view)["values"].tolist() == [1, 1, 1]
    assert not recwarn.list


@pytest.mark.parametrize("offset", range(1, 16))
def test_tensors_of_a_view_at_any_address_are_moved_and_not_copied(offset):
    tree = {"a": torch.rand(3, 7), "b": torch.rand(5).half(), "c": torch.arange(3), "d": torch.ones(3).bool()}
    tree |= {f"{number:03}": torch.rand(number % 5).half() for number in range(200)}
    view = writable(pack(FlatTree(tree)), offset)
    found = unpack(view)
    assert all(torch.equal(found[name], value) for name, value in tree.items())
    start = np.frombuffer(view, np.uint8).ctypes.data
    for value in found.values():
        assert value.data_ptr() % 16 == 0
        assert not value.numel() or start <= value.data_ptr() < start + len(view)


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
FILES = {
    "valid": ({"a": ENTRY}, 16),
    "two tensors": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [16, 32]}}, 32),
    "other order": ({"b": {**ENTRY, "data_offsets": [16, 32]}, "a": ENTRY}, 32),
    "no values": ({"a": {**ENTRY, "shape": [0, 7], "data_offsets": [0, 0]}}, 0),
    "no values between": ({"b": {**ENTRY, "shape": [0], "data_offsets": [16, 16]}, "a": ENTRY}, 16),
    "scalar": ({"a": {**ENTRY, "shape": [], "data_offsets": [0, 4]}}, 4),
    "gap": ({"a": {**ENTRY, "data_offsets": [4, 20]}}, 20),
    "gap between": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [20, 36]}}, 36),
    "overlap": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 24]}}, 24),
    "the same bytes": ({"a": ENTRY, "b": ENTRY}, 16),
    "trailing bytes": ({"a": ENTRY}, 17),
    "missing bytes": ({"a": ENTRY}, 15),
    "other size": ({"a": {**ENTRY, "data_offsets": [0, 12]}}, 12),
    "other dtype": ({"a": {**ENTRY, "dtype": "F64"}}, 16),
    "unknown dtype": ({"a": {**ENTRY, "dtype": "F31"}}, 16),
    "negative size": ({"a": {**ENTRY, "shape": [-2, -2]}}, 16),
    "negative offset": ({"a": {**ENTRY, "data_offsets": [-16, 0]}}, 16),
    "fraction": ({"a": {**ENTRY, "shape": [4.0]}}, 16),
    "boolean": ({"a": {**ENTRY, "shape": [True, 4]}}, 16),
    "text": ({"a": {**ENTRY, "shape": ["4"]}}, 16),
    "huge size": ({"a": {**ENTRY, "shape": [2**62, 16]}}, 16),
    "huge size without values": ({"a": {**ENTRY, "shape": [0, 2**70], "data_offsets": [0, 0]}}, 0),
    "three offsets": ({"a": {**ENTRY, "data_offsets": [0, 16, 16]}}, 16),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, 16),
    "no mapping": ({"a": [0, 16]}, 16),
}


@pytest.mark.parametrize("padding", [8, 1], ids=["aligned", "any length"])
@pytest.mark.parametrize("name", FILES)
def test_a_view_is_accepted_exactly_if_safetensors_accepts_the_bytes(name, padding):
    entries, num_bytes = FILES[name]
    blob = with_header(entries, bytes(range(num_bytes)), padding)
    try:
        expected = safetensors.torch.load(blob)["a"]
    except Exception:
        expected = None
    for content in (blob, writable(blob)):
        if expected is None:
            with pytest.raises(ValueError, match="Not a packed tree"):
                unpack(content)
        else:
            assert unpack(content).equal(expected)


def test_damaged_bytes_of_a_view_raise_only_value_errors():
    blob = pack({"kind": "x", "state": {"w": torch.ones(3), "b": torch.zeros(2, 2)}})
    for position in range(len(blob) - 28):
        for value in (0, 34, 57, 255):
            view = writable(blob)
            view[position] = value
            try:
                unpack(view)
            except ValueError:
                continue


def test_a_large_reply_is_in_memory_once():
    update = ClientUpdate(0, "north", {"w": torch.rand(CHUNK_BYTES)}, 1, 0, 1)
    blob = update.to_bytes()
    joined = join_chunks(split_into_chunks(blob), len(blob))
    assert joined == blob
    state = read_message(joined).state["w"]
    assert state.equal(update.state["w"])
    start = np.frombuffer(joined, np.uint8).ctypes.data
    assert start < state.data_ptr() < start + len(blob)
    assert isinstance(join_chunks([b"abc"], 3), bytes)
