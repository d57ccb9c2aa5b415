"""`ProcessGroup` in a launch of one process, and the buckets of tensors for a sum."""

from __future__ import annotations

import pytest
import torch

from hf_federated.distributed import process_group as process_group_module
from hf_federated.distributed.process_group import ProcessGroup


def test_one_process_communicates_with_itself() -> None:
    group = ProcessGroup(rank=0, world_size=1)
    values = [torch.ones(3)]
    assert group.gather("here", {"a": 1}) == [{"a": 1}]
    assert group.sum_(values) == 0 and values[0].tolist() == [1, 1, 1]
    group.wait("here")
    group.raise_if_peer_failed()
    with group.independent(as_main=True):
        pass
    with pytest.raises(KeyError, match="mine"), group.fail_together():
        raise KeyError("mine")


def test_buckets_hold_consecutive_tensors_of_one_dtype_up_to_a_size(monkeypatch) -> None:
    monkeypatch.setattr(process_group_module, "BUCKET_BYTES", 40)
    shapes = [(5,), (5,), (1,), (50,), (2,), (2,)]
    tensors = [torch.zeros(shape) for shape in shapes] + [torch.zeros(1, dtype=torch.float64)]
    buckets = list(process_group_module._buckets(tensors))
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets] == [[5, 5], [1], [50], [2, 2], [1]]
    assert all(a is b for a, b in zip(sum(buckets, []), tensors, strict=True))
    assert list(process_group_module._buckets([])) == []
