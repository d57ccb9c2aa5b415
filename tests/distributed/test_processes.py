"""`Processes` of a launch of one, and how tensors are put together for a sum."""

from __future__ import annotations

import pytest
import torch

from hf_federated.distributed import process_group as module
from hf_federated.distributed.process_group import Processes


def test_one_process_needs_nobody() -> None:
    alone = Processes(rank=0, world_size=1)
    values = [torch.ones(3)]
    assert alone.gather("here", {"a": 1}) == [{"a": 1}]
    assert alone.sum_(values) == 0 and values[0].tolist() == [1, 1, 1]
    alone.wait("here")
    alone.look_for_failure()
    with alone.independent(as_main=True):
        pass
    with pytest.raises(KeyError, match="mine"), alone.shared_fate():
        raise KeyError("mine")


def test_buckets_hold_neighbours_of_one_dtype_up_to_a_size(monkeypatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", 40)
    shapes = [(5,), (5,), (1,), (50,), (2,), (2,)]
    tensors = [torch.zeros(shape) for shape in shapes] + [torch.zeros(1, dtype=torch.float64)]
    buckets = list(module._buckets(tensors))
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets] == [[5, 5], [1], [50], [2, 2], [1]]
    assert all(a is b for a, b in zip(sum(buckets, []), tensors, strict=True))
    assert list(module._buckets([])) == []
