"""A checkpoint is complete or absent; the oldest go first, the best and the last stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_federated.trainer.checkpoint import (
    STAGING_DIR,
    check_weights,
    clients_directory,
    discard,
    list_checkpoints,
    publish,
    read_server_state,
    rotate,
    staged_directory,
    write_server_state,
)


def make(output_dir: Path, *steps: int) -> list[Path]:
    paths = [output_dir / f"checkpoint-{step}" for step in steps]
    for path in paths:
        path.mkdir()
        (path / "model").write_text(path.name)
    return paths


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def test_server_state_survives_a_checkpoint(tmp_path):
    state = {"aggregation": {"momentum": {0: torch.ones(2)}}, "ledger": {"rounds": {}}, "betas": (0.9, 0.99)}
    write_server_state(tmp_path, state)
    loaded = read_server_state(tmp_path)
    assert torch.equal(loaded["aggregation"]["momentum"][0], torch.ones(2))
    assert (loaded["ledger"], loaded["betas"]) == (state["ledger"], state["betas"])
    assert clients_directory(tmp_path).parent == tmp_path / "federated"


def test_a_checkpoint_of_a_plain_trainer_is_refused_by_what_is_missing(tmp_path):
    (path,) = make(tmp_path, 3)
    with pytest.raises(ValueError, match=r"checkpoint-3' is no checkpoint of a federation: federated/server\.safeten"):
        read_server_state(path)


def test_a_damaged_server_state_is_refused(tmp_path):
    write_server_state(tmp_path, {"step": 1})
    file = tmp_path / "federated" / "server.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"federated/server\.safetensors': .*damaged"):
        read_server_state(tmp_path)


def test_weights_cut_short_are_refused_by_the_files_name(tmp_path):
    for number in (1, 2):
        save_file({"w": torch.ones(9)}, tmp_path / f"model-{number}.safetensors")
    check_weights(tmp_path)
    file = tmp_path / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"/model-2\.safetensors' was damaged or copied in part"):
        check_weights(tmp_path)


def test_nothing_is_a_checkpoint_before_it_is_published(tmp_path):
    final = tmp_path / "checkpoint-1"
    with staged_directory(tmp_path) as staging:
        staged = staging / final.name
        staged.mkdir()
        (staged / "model").write_text("half")
        assert list_checkpoints(tmp_path) == []
        (staged / "model").write_text("whole")
        publish(staged, final)
        assert list_checkpoints(tmp_path) == [final]
    assert (final / "model").read_text() == "whole"
    assert names(tmp_path) == ["checkpoint-1"]


def test_staging_carries_the_name_of_the_output_directory(tmp_path, monkeypatch):
    with staged_directory(tmp_path / "my-model") as staging:
        assert staging.name == "my-model"
    monkeypatch.chdir(tmp_path)
    with staged_directory(".") as staging:
        assert staging.name == tmp_path.name


def test_a_failure_while_staging_leaves_no_trace(tmp_path):
    with pytest.raises(RuntimeError, match="disk full"):
        with staged_directory(tmp_path) as staging:
            (staging / "checkpoint-1").mkdir()
            raise RuntimeError("disk full")
    assert names(tmp_path) == []


def test_what_a_killed_run_left_is_cleared_and_never_a_checkpoint(tmp_path):
    left = tmp_path / STAGING_DIR / tmp_path.name / "checkpoint-7"
    left.mkdir(parents=True)
    (left / "model").write_text("half")
    assert list_checkpoints(tmp_path) == []
    with staged_directory(tmp_path) as staging:
        assert list(staging.iterdir()) == []


def test_publishing_replaces_a_checkpoint_of_the_same_name_as_a_whole(tmp_path):
    (final,) = make(tmp_path, 1)
    (final / "only in the old one").write_text("")
    with staged_directory(tmp_path) as staging:
        (staging / final.name).mkdir()
        (staging / final.name / "model").write_text("new")
        publish(staging / final.name, final)
    assert names(final) == ["model"] and (final / "model").read_text() == "new"


def test_a_discarded_checkpoint_is_gone_even_twice(tmp_path):
    for _ in range(2):
        (path,) = make(tmp_path, 5)
        discard(path)
        assert list_checkpoints(tmp_path) == []


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path):
    paths = make(tmp_path, 100, 9, 20)
    for other in ("checkpoint-", "checkpoint-3-old", "checkpoint-x", "mycheckpoint-4", "runs", STAGING_DIR):
        (tmp_path / other).mkdir()
    assert list_checkpoints(tmp_path) == [paths[1], paths[2], paths[0]]


def test_no_directory_holds_no_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [1, 2, 10]),
        (0, None, [1, 2, 10]),
        (5, None, [1, 2, 10]),
        (2, None, [2, 10]),
        (1, None, [10]),
        (1, 1, [1, 10]),
        (2, 1, [1, 10]),
        (2, 10, [2, 10]),
        (1, 10, [10]),
    ],
)
def test_the_oldest_go_but_never_the_best_or_the_last(tmp_path, limit, best, kept):
    make(tmp_path, 1, 2, 10)
    rotate(tmp_path, limit, None if best is None else str(tmp_path / f"checkpoint-{best}"), 10)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]


def test_rotation_leaves_nothing_beside_the_checkpoints(tmp_path):
    make(tmp_path, 1, 2)
    rotate(tmp_path, 1, None, 2)
    assert names(tmp_path) == ["checkpoint-2"]


def test_rotation_of_nothing_is_nothing(tmp_path):
    rotate(tmp_path, 1, None, 1)
    rotate(tmp_path, 1, str(tmp_path / "checkpoint-1"), 1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (1, None, ["checkpoint-10"]),
        (2, None, ["checkpoint-5", "checkpoint-10"]),
        (2, 5, ["checkpoint-5", "checkpoint-10"]),
        (3, None, ["checkpoint-5", "checkpoint-10", "checkpoint-100"]),
    ],
)
def test_what_another_run_left_behind_goes_first(tmp_path, limit, best, kept):
    """Though its steps are later: the run has come to step 10."""
    make(tmp_path, 90, 100, 5, 10)
    rotate(tmp_path, limit, None if best is None else str(tmp_path / f"checkpoint-{best}"), 10)
    assert [path.name for path in list_checkpoints(tmp_path)] == kept
