"""A tree in pieces has the bytes of the packed tree and of a file of safetensors, and its tensors are not copied."""

from __future__ import annotations

import math

import pytest
import safetensors.torch
import torch

from hf_federated.messages import ClientUpdate, Fit, read_message
from hf_federated.messages.serialization import PackedPieces, _split, pack
from hf_federated.transport.protocol import CHUNK_BYTES, JoinedPieces, split_into_chunks


SHARED = torch.arange(6.0)
TREES = {
    "scalars": {"a": 1, "b": math.nan, "c": "ü", "d": None, "e": (1, [True])},
    "empty": {},
    "dtypes": {
        str(dtype): torch.ones(3, 5).to(dtype)
        for dtype in (torch.bool, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    },
    "shapes": {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "large": torch.randn(700, 900)},
    "views": {
        "transposed": torch.randn(4, 3).T,
        "slice": torch.arange(20)[3:9:2],
        "expanded": torch.ones(1).expand(5),
    },
    "shared": {"first": SHARED, "second": SHARED, "view": SHARED[2:]},
    "names": {"$float": torch.ones(1), 3: torch.zeros(2), "ä" * 50: torch.ones(2)},
}


@pytest.mark.parametrize("name", TREES)
def test_joined_pieces_equal_a_file_of_safetensors(name):
    pieces = PackedPieces(TREES[name])
    blob = pack(TREES[name])
    tensors, metadata = _split(TREES[name])
    copies = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    assert blob == safetensors.torch.save(copies, metadata)
    assert len(pieces) == len(blob)
    assert b"".join(pieces) == blob == b"".join(pieces)  # the pieces can be read again
    assert b"".join(split_into_chunks(pieces)) == blob


def test_pieces_are_views_of_the_tensors():
    tensor = torch.zeros(1000)
    _, piece = PackedPieces({"tensor": tensor})
    tensor.fill_(1.0)
    assert torch.frombuffer(piece, dtype=torch.float32).equal(tensor)


def test_unsupported_value_is_named():
    with pytest.raises(TypeError, match=r"a\.b"):
        PackedPieces({"a": {"b": object()}})


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17])
def test_chunks_have_the_size_of_a_chunk_except_for_the_last(length):
    data = bytes(range(256)) * (length // 256 + 1)
    parts = [data[:length][start : start + 300_000] for start in range(0, length, 300_000)]
    for blob in (data[:length], JoinedPieces(*parts), JoinedPieces(b"", JoinedPieces(*parts), b"")):
        chunks = list(split_into_chunks(blob))
        assert b"".join(chunks) == data[:length] and len(blob) == length
        assert all(len(chunk) == CHUNK_BYTES for chunk in chunks[:-1])
        assert all(0 < len(chunk) <= CHUNK_BYTES for chunk in chunks)


@pytest.mark.parametrize(
    "message",
    [
        Fit(1, "north", 7, {"w": torch.randn(3)}, settings={"mu": 0.1}, nonce="abc"),
        ClientUpdate(1, "ü", {"w": torch.randn(3), "n": torch.tensor(3)}, 3, 0, 1, {"loss": math.nan}),
    ],
    ids=lambda message: message.kind,
)
def test_message_in_pieces_is_read_as_the_message(message):
    blob = b"".join(message.to_pieces())
    assert blob == message.to_bytes() and len(blob) == message.num_bytes
    assert read_message(blob).to_bytes() == blob
