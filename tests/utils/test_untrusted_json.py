"""Limits of JSON from another party hold before it is parsed."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch

from hf_federated.messages import read_message
from hf_federated.messages.serialization import pack, packed_kind, unpack
from hf_federated.transport.protocol import ConnectResponse
from hf_federated.utils.untrusted_json import MAX_BYTES, MAX_VALUES, parse_json


HUGE = 39 * 10**6
BOMBS = {
    "lists": '{"__metadata__":{},"a":[%s[]]}' % ("[]," * (HUGE // 3)),
    "dictionaries": '{"__metadata__":{},"a":[%s{}]}' % ("{}," * (HUGE // 3)),
    "numbers": '{"__metadata__":{"tree":"[%s1]"}}' % ("1," * (HUGE // 2)),
    "keys": '{"__metadata__":{%s"a":""}}' % ('"":0,' * (HUGE // 5)),
    "one text": '{"__metadata__":{"tree":"%s"}}' % ("a" * HUGE),
    "one number": '{"__metadata__":%s}' % ("1" * HUGE),
    "fewer lists": "[%s[]]" % ("[]," * MAX_VALUES),
}


def message(header: str) -> bytes:
    """Return a file of safetensors with a header and no tensors."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def peak(function, *args) -> int:
    """Return the largest number of bytes that Python allocates during a call that raises `ValueError`."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="allowed|damaged"):
            function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("view", [bytes, lambda blob: memoryview(bytearray(blob))], ids=["bytes", "view"])
@pytest.mark.parametrize("name", BOMBS)
def test_header_with_too_many_values_is_refused_before_it_is_parsed(name, view):
    blob = view(message(BOMBS[name]))
    # At most one copy of the text, of which a character has at most four bytes.
    assert peak(read_message, blob) < 4 * MAX_BYTES
    assert packed_kind(blob) is None


def test_text_of_the_transport_is_limited():
    assert peak(ConnectResponse.from_json, '{"session": [%s]}' % ("[]," * MAX_VALUES)) < 4 * MAX_BYTES


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_an_error(opening):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(opening * 10**5)


@pytest.mark.parametrize(("text", "num_values"), [("[]", 2), ("[1,2]", 3), ('{"a":[{"b":1}]}', 4), ("1", 1)])
def test_number_of_values_is_not_underestimated(text, num_values):
    assert parse_json(text, max_values=num_values) == json.loads(text)
    with pytest.raises(ValueError, match="values"):
        parse_json(text, max_values=num_values - 1)


def test_bytes_must_be_utf_8():
    assert parse_json(memoryview('"ä"'.encode())) == "ä"
    with pytest.raises(ValueError, match="utf-8"):
        parse_json('"ä"'.encode("utf-16"))


def test_message_with_many_tensors_is_read():
    """A model with 256 experts in each of 60 layers has about 46,000 tensors of experts."""
    tree = {
        f"model.layers.{number % 60}.mlp.experts.{number}.down_proj.weight": torch.ones(1) for number in range(46_000)
    }
    blob = pack({"state": tree, "extra": {}})
    assert unpack(blob)["state"].keys() == tree.keys()
