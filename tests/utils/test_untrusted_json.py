"""Limits of JSON from another party hold before it is parsed."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
import torch

from hf_federated.messages import Metrics, read_message
from hf_federated.messages.serialization import (
    MAX_FILE_TENSORS,
    MAX_TENSORS,
    FlatTree,
    pack,
    packed_kind,
    unpack,
)
from hf_federated.transport.protocol import ConnectResponse
from hf_federated.utils.untrusted_json import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_TEXT,
    MAX_VALUES,
    parse_json,
    read_json,
)


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


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_limited_where_the_interpreter_still_parses(opening, closing):
    allowed = opening * MAX_DEPTH + "1" + closing * MAX_DEPTH
    assert parse_json(allowed) == json.loads(allowed)
    with pytest.raises(ValueError, match=f"at most {MAX_DEPTH} levels"):
        parse_json(f"[{allowed}]")


@pytest.mark.parametrize("form", ['"{}"', '["{}"]', '{{"{}": 1}}', '{{"a": [{{"b": "{}"}}]}}'])
def test_length_of_a_text_is_limited(form):
    assert parse_json(form.format("a" * 100), max_text=100) == json.loads(form.format("a" * 100))
    with pytest.raises(ValueError, match="a text in the JSON has 101 characters, and at most 100"):
        parse_json(form.format("a" * 101), max_text=100)


@pytest.mark.parametrize("key", ["tree", "a"])
def test_values_that_are_escaped_in_the_header_are_counted(key):
    tree = r"\u005b" + r"\u005b\u005d\u002c" * (MAX_VALUES // 2) + r"1\u005d"
    blob = message(f'{{"__metadata__":{{"{key}":"{tree}"}}}}')
    with pytest.raises(ValueError, match="values"):
        unpack(blob)
    assert packed_kind(blob) is None


def test_header_is_limited_by_the_expected_number_of_tensors():
    tree = {f"layer.{number}": torch.ones(1) for number in range(100)}
    for form in (FlatTree(tree), {"state": tree}):
        assert unpack(pack(form), max_tensors=100).keys() == form.keys()
        with pytest.raises(ValueError, match="the header has 100 tensors, and at most 99"):
            unpack(pack(form), max_tensors=99)
    with pytest.raises(ValueError, match="bytes are allowed|at most .* are allowed"):
        unpack(message('{"__metadata__":{"tree":"%s"}}' % ("a" * 10**7)), max_tensors=10)
    large = pack([torch.zeros(0)] * 5 + [list(range(400_000))])
    assert len(unpack(large)) == 6
    with pytest.raises(ValueError, match="values, and at most"):
        unpack(large, max_tensors=10)


@pytest.mark.slow
def test_file_of_a_checkpoint_may_have_more_tensors_than_a_message():
    blob = pack([torch.zeros(0) for _ in range(MAX_TENSORS + 1)])
    assert len(unpack(blob, MAX_FILE_TENSORS)) == MAX_TENSORS + 1
    with pytest.raises(ValueError, match="at most"):
        unpack(blob)


LONG = "x" * 10**6
ERRORS = {
    "kind": {"kind": LONG[:900_000], "fields": {}},
    "many fields": {"kind": "metrics", "fields": {f"{number} {LONG[:500]}": 1 for number in range(10_000)}},
    "name of a tensor": FlatTree({LONG: torch.ones(1)}),
    "names of tensors": FlatTree({"kind": "metrics", **{f"a.{LONG[:1900]}{n}": torch.ones(1) for n in range(500)}}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_short_whatever_the_message_contains(name):
    blob = pack(ERRORS[name])
    for read in (read_message, Metrics.from_bytes):
        with pytest.raises(ValueError) as error:
            read(blob)
        assert len(str(error.value)) < 2000


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


def test_file_that_is_too_large_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    path.write_text('{"rounds": [1, 2]}')
    assert read_json(path) == {"rounds": [1, 2]}
    with open(path, "r+b") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("the file was read"))
    with pytest.raises(ValueError, match=f"the file has {MAX_FILE_BYTES + 1} bytes, and at most {MAX_FILE_BYTES}"):
        read_json(path)


def test_file_may_have_a_long_text_but_no_other_encoding(tmp_path):
    path = tmp_path / "record.json"
    path.write_bytes(b'["' + b"a" * (MAX_TEXT + 1) + b'"]')
    assert len(read_json(path)[0]) == MAX_TEXT + 1
    path.write_bytes('["a"]'.encode("utf-16"))
    with pytest.raises(ValueError, match="utf-8"):
        read_json(path)
