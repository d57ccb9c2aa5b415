"""`ProcessGroup` in a launch of one process."""

from __future__ import annotations

import pytest
import torch

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
