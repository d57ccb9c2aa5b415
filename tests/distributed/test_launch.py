"""`check_launch`: launches of several processes that accelerate does not connect."""

from __future__ import annotations

import pytest
from federations import build_federation

from hf_federated.distributed.launch import check_launch


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "sets 2 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "sets 4 processes"),
        ({"MASTER_ADDR": "10.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"}, "main process at 10.0.0.1"),
    ],
)
def test_launch_of_several_independent_processes_is_refused(monkeypatch, environment, message):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    check_launch(1)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_launch(2)
    with pytest.raises(ValueError, match=message):
        check_launch(1)


def test_trainer_refuses_a_launch_of_independent_processes(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ValueError, match="each process would train the whole federation alone"):
        build_federation(tmp_path)
