"""Buckets of tensors for one collective operation."""

from __future__ import annotations

import torch

from hf_federated.distributed import buckets as buckets_module


def test_buckets_hold_consecutive_tensors_of_one_dtype_up_to_a_size(monkeypatch) -> None:
    monkeypatch.setattr(buckets_module, "BUCKET_BYTES", 40)
    shapes = [(5,), (5,), (1,), (50,), (2,), (2,)]
    tensors = [torch.zeros(shape) for shape in shapes] + [torch.zeros(1, dtype=torch.float64)]
    found = list(buckets_module.buckets(tensors))
    assert [[tensor.numel() for tensor in bucket] for bucket in found] == [[5, 5], [1], [50], [2, 2], [1]]
    assert all(a is b for a, b in zip(sum(found, []), tensors, strict=True))
    assert list(buckets_module.buckets([])) == []
