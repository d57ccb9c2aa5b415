"""Predictions that are decoded block by block equal the predictions that are decoded at once."""

from __future__ import annotations

import pytest
import torch

from hf_federated.distillation import PredictionCodec
from hf_federated.distillation.codec import rows_of
from hf_federated.distillation.lazy_rows import LazyRows, concatenate_encoded, decode_lazily


# The indices take one, two and four bytes.
@pytest.mark.parametrize("num_classes", [20, 300, 70_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_decode_to_the_same_values_as_the_whole(num_classes, dtype):
    codec = PredictionCodec(dtype, top_k=4)
    logits = torch.randn(7, num_classes, generator=torch.Generator().manual_seed(0))
    encoded = codec.encode({"rows": logits})
    parts = concatenate_encoded([codec.encode({"rows": part}) for part in logits.split(3)])
    assert parts.keys() == encoded.keys()
    for name, value in encoded.items():
        assert parts[name].dtype == value.dtype and torch.equal(parts[name].float(), value.float())
    rows = decode_lazily(encoded, lambda values: codec.decode(values, rows_of(num_classes))["rows"])
    decoded = codec.decode(encoded, rows_of(num_classes))["rows"]
    indices = torch.tensor([6, 0, 6])
    assert torch.equal(rows[indices], decoded[indices])
    assert torch.equal(rows.select(torch.tensor([1, 5, 6]))[torch.tensor([2])], rows[torch.tensor([6])])
    assert torch.equal(torch.cat(list(rows.blocks())), decoded)


def test_rows_are_decoded_on_demand():
    num_decoded = []
    rows = LazyRows(600, lambda indices: num_decoded.append(len(indices)) or indices.unsqueeze(1).float())
    assert len(rows) == 600 and not num_decoded
    assert sum(len(block) for block in rows.blocks()) == 600
    assert num_decoded == [256, 256, 88]


def test_empty_predictions_are_one_empty_block():
    codec = PredictionCodec(top_k=2)
    encoded = codec.encode({"rows": torch.empty(0, 5)})
    rows = decode_lazily(encoded, lambda values: codec.decode(values, rows_of(5))["rows"])
    assert [tuple(block.shape) for block in rows.blocks()] == [(0, 5)]


def test_tensors_of_different_lengths_are_rejected():
    values = PredictionCodec(top_k=2).encode({"rows": torch.randn(3, 5)})
    values["rest"] = values["rest"][:2]
    with pytest.raises(ValueError, match="tensors of different lengths: .*'rest': 2"):
        decode_lazily(values, lambda part: part["values"])
