"""Checkpoints are complete or absent. Rotation deletes the oldest and keeps the best and the last checkpoint."""

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


def make_checkpoints(output_dir: Path, *steps: int) -> list[Path]:
    paths = [output_dir / f"checkpoint-{step}" for step in steps]
    for path in paths:
        path.mkdir()
        (path / "model").write_text(path.name)
    return paths


def names(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def test_server_state_is_restored_from_a_checkpoint(tmp_path):
    state = {"aggregation": {"momentum": {0: torch.ones(2)}}, "ledger": {"rounds": {}}, "betas": (0.9, 0.99)}
    write_server_state(tmp_path, {**state, "identity": {}, "clients": {}})
    loaded = read_server_state(tmp_path)
    assert torch.equal(loaded["aggregation"]["momentum"][0], torch.ones(2))
    assert (loaded["ledger"], loaded["betas"]) == (state["ledger"], state["betas"])
    assert clients_directory(tmp_path).parent == tmp_path / "federated"


def test_checkpoint_of_plain_trainer_is_refused(tmp_path):
    (path,) = make_checkpoints(tmp_path, 3)
    with pytest.raises(
        ValueError, match=r"checkpoint-3' is not a checkpoint of a federation: federated/server\.safeten"
    ):
        read_server_state(path)


def test_damaged_server_state_is_refused(tmp_path):
    write_server_state(tmp_path, {"step": 1})
    file = tmp_path / "federated" / "server.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"federated/server\.safetensors': .*damaged"):
        read_server_state(tmp_path)


def test_truncated_weight_file_is_named_in_the_error(tmp_path):
    for number in (1, 2):
        save_file({"w": torch.ones(9)}, tmp_path / f"model-{number}.safetensors")
    check_weights(tmp_path)
    file = tmp_path / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"/model-2\.safetensors' is damaged or incomplete"):
        check_weights(tmp_path)


def test_staged_checkpoint_is_not_listed_before_publishing(tmp_path):
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


def test_staging_directory_has_the_name_of_the_output_directory(tmp_path, monkeypatch):
    with staged_directory(tmp_path / "my-model") as staging:
        assert staging.name == "my-model"
    monkeypatch.chdir(tmp_path)
    with staged_directory(".") as staging:
        assert staging.name == tmp_path.name


def test_failure_while_staging_leaves_no_files(tmp_path):
    with pytest.raises(RuntimeError, match="disk full"):
        with staged_directory(tmp_path) as staging:
            (staging / "checkpoint-1").mkdir()
            raise RuntimeError("disk full")
    assert names(tmp_path) == []


def test_staging_directory_of_a_killed_run_is_cleared(tmp_path):
    leftover = tmp_path / STAGING_DIR / tmp_path.name / "checkpoint-7"
    leftover.mkdir(parents=True)
    (leftover / "model").write_text("half")
    assert list_checkpoints(tmp_path) == []
    with staged_directory(tmp_path) as staging:
        assert list(staging.iterdir()) == []


def test_publishing_replaces_a_checkpoint_with_the_same_name(tmp_path):
    (final,) = make_checkpoints(tmp_path, 1)
    (final / "only in the old one").write_text("")
    with staged_directory(tmp_path) as staging:
        (staging / final.name).mkdir()
        (staging / final.name / "model").write_text("new")
        publish(staging / final.name, final)
    assert names(final) == ["model"] and (final / "model").read_text() == "new"


def test_checkpoint_can_be_discarded_repeatedly(tmp_path):
    for _ in range(2):
        (path,) = make_checkpoints(tmp_path, 5)
        discard(path)
        assert list_checkpoints(tmp_path) == []


def test_only_checkpoints_are_listed_in_order_of_steps(tmp_path):
    paths = make_checkpoints(tmp_path, 100, 9, 20)
    for name in ("checkpoint-", "checkpoint-3-old", "checkpoint-x", "mycheckpoint-4", "runs", STAGING_DIR):
        (tmp_path / name).mkdir()
    assert list_checkpoints(tmp_path) == [paths[1], paths[2], paths[0]]


def test_missing_directory_has_no_checkpoints(tmp_path):
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
def test_rotation_keeps_the_best_and_the_last_checkpoint(tmp_path, limit, best, kept):
    make_checkpoints(tmp_path, 1, 2, 10)
    rotate(tmp_path, limit, None if best is None else str(tmp_path / f"checkpoint-{best}"), 10)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in kept]


def test_rotation_leaves_only_checkpoints(tmp_path):
    make_checkpoints(tmp_path, 1, 2)
    rotate(tmp_path, 1, None, 2)
    assert names(tmp_path) == ["checkpoint-2"]


def test_rotation_of_an_empty_directory_does_nothing(tmp_path):
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
def test_rotation_deletes_checkpoints_of_an_earlier_run_first(tmp_path, limit, best, kept):
    """The checkpoints of the earlier run have later steps than the current step 10."""
    make_checkpoints(tmp_path, 90, 100, 5, 10)
    rotate(tmp_path, limit, None if best is None else str(tmp_path / f"checkpoint-{best}"), 10)
    assert [path.name for path in list_checkpoints(tmp_path)] == kept
