"""Predictions that are unpacked block by block are those that are unpacked as a whole."""

from __future__ import annotations

import pytest
import torch

from hf_federated.distillation import PredictionCodec
from hf_federated.distillation.lazy_rows import LazyRows, concatenate_encoded, decode_lazily


# Indices of one byte, of two and of four.
@pytest.mark.parametrize("num_classes", [20, 300, 70_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_are_the_whole(num_classes, dtype):
    codec = PredictionCodec(dtype, top_k=4)
    logits = torch.randn(7, num_classes, generator=torch.Generator().manual_seed(0))
    whole = codec.encode(logits)
    parts = concatenate_encoded([codec.encode(part) for part in logits.split(3)])
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        assert parts[name].dtype == value.dtype and torch.equal(parts[name].float(), value.float())
    rows = decode_lazily(whole, lambda values: codec.decode(values, num_classes))
    places = torch.tensor([6, 0, 6])
    assert torch.equal(rows[places], codec.decode(whole, num_classes)[places])
    assert torch.equal(rows.select(torch.tensor([1, 5, 6]))[torch.tensor([2])], rows[torch.tensor([6])])
    assert torch.equal(torch.cat(list(rows.blocks())), codec.decode(whole, num_classes))


def test_only_what_is_asked_for_is_made():
    made = []
    rows = LazyRows(600, lambda places: made.append(len(places)) or places.unsqueeze(1).float())
    assert len(rows) == 600 and not made
    assert sum(len(block) for block in rows.blocks()) == 600
    assert made == [256, 256, 88]


def test_no_rows_are_one_empty_block():
    codec = PredictionCodec(top_k=2)
    rows = decode_lazily(codec.encode(torch.empty(0, 5)), lambda values: codec.decode(values, 5))
    assert [tuple(block.shape) for block in rows.blocks()] == [(0, 5)]


def test_tensors_of_different_lengths_are_refused():
    values = PredictionCodec(top_k=2).encode(torch.randn(3, 5))
    values["rest"] = values["rest"][:2]
    with pytest.raises(ValueError, match="tensors of different lengths: .*'rest': 2"):
        decode_lazily(values, lambda part: part["values"])
