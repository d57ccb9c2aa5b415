"""A checkpoint with a damaged file is refused by the name of the file before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import build_federation
from split_runs import clients_of, split_trainer
from tiny import rows
from transformers import TrainerCallback

from hf_federated import FederatedTrainer, SplitConfig
from hf_federated.trainer.manifest import MANIFEST_FILE, _digest_of, check_manifest, read_manifest, write_manifest


CARRIED = {"federation": {"client_optimizer_state": "carry", "aggregation": "fedopt"}, "save_strategy": "steps"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run with two checkpoints, which contain optimizer states of clients."""
    output_dir = tmp_path_factory.mktemp("run")
    build_federation(output_dir, **CARRIED).train()
    return output_dir


def resume(output_dir: Path, **kwargs: Any) -> FederatedTrainer:
    trainer = build_federation(output_dir, **{**CARRIED, **kwargs})
    trainer.train(resume_from_checkpoint=True)
    return trainer


def flip_bit(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)


def test_manifest_lists_every_file_of_a_checkpoint(saved):
    checkpoint = saved / "checkpoint-2"
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    listed = read_manifest(checkpoint / MANIFEST_FILE)
    assert set(listed) == files - {MANIFEST_FILE}
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "federated/server.safetensors"} < set(listed)
    assert sum(name.startswith("federated/clients/") for name in listed) == 3
    check_manifest(checkpoint)


def test_flipped_bit_in_any_file_is_refused_by_the_name_of_the_file(saved, tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    for name in [*read_manifest(saved / "checkpoint-2" / MANIFEST_FILE), MANIFEST_FILE]:
        shutil.copytree(saved / "checkpoint-2", checkpoint)
        flip_bit(checkpoint / name)
        with pytest.raises(ValueError, match=rf"{re.escape(name)}' .*resume from another checkpoint"):
            check_manifest(checkpoint)
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", "optimizer.pt", "rng_state.pth"])
def test_damaged_file_is_refused_before_anything_is_loaded(name, saved, tmp_path, monkeypatch):
    shutil.copytree(saved / "checkpoint-2", tmp_path / "checkpoint-2")
    flip_bit(tmp_path / "checkpoint-2" / name)
    loaded: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loaded.append(args))
    with pytest.raises(ValueError, match=rf"{re.escape(name)}' has other bytes than were saved"):
        resume(tmp_path)
    assert loaded == []


def test_truncated_and_missing_files_are_refused_by_name(saved, tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(saved / "checkpoint-2", checkpoint)
    state = (checkpoint / "trainer_state.json").read_bytes()
    (checkpoint / "trainer_state.json").write_bytes(state[:-1])
    with pytest.raises(ValueError, match=rf"trainer_state\.json' has {len(state) - 1} bytes, but {len(state)} bytes"):
        resume(tmp_path)
    (checkpoint / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"trainer_state\.json' is missing"):
        resume(tmp_path)


def test_checkpoint_without_a_manifest_resumes_with_a_warning(saved, tmp_path, monkeypatch):
    """Checkpoints of hf_federated 0.1.0 have no manifest."""
    shutil.copytree(saved / "checkpoint-1", tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / MANIFEST_FILE).unlink()
    warnings: list[str] = []
    monkeypatch.setattr("hf_federated.trainer.manifest.logger.warning", warnings.append)
    assert resume(tmp_path).state.global_step == 2
    assert len(warnings) == 1
    assert "checkpoint-1' has no federated/manifest.json" in warnings[0]


def test_further_files_are_allowed_unless_the_trainer_would_unpickle_them(saved, tmp_path):
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(saved / "checkpoint-2", checkpoint)
    (checkpoint / "notes.txt").write_text("written by a callback")
    check_manifest(checkpoint)
    (checkpoint / "rng_state_1.pth").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"rng_state_1\.pth' is not in federated/manifest\.json"):
        check_manifest(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", ""])
def test_manifest_cannot_list_files_outside_the_checkpoint(name, tmp_path):
    (tmp_path / "model").write_bytes(b"model")
    write_manifest(tmp_path)
    content = json.loads((tmp_path / MANIFEST_FILE).read_text())
    content["files"] = {name: content["files"]["model"]}
    content["sha256"] = _digest_of(content["files"])
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest\.json' is not the manifest of a checkpoint: its entry"):
        check_manifest(tmp_path)


def test_damaged_best_model_is_refused_at_the_end_of_training(tmp_path):
    class FlipBit(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                flip_bit(Path(state.best_model_checkpoint) / "model.safetensors")

    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps"}
    trainer = {"eval_dataset": rows(4), "callbacks": [FlipBit()]}
    with pytest.raises(ValueError, match=r"model\.safetensors' has other bytes"):
        build_federation(tmp_path, **{**CARRIED, **best}, trainer=trainer).train()


def test_split_checkpoint_with_a_flipped_bit_is_refused_by_the_name_of_the_file(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), **settings).train()
    checkpoint = tmp_path / "checkpoint-1"
    listed = read_manifest(checkpoint / MANIFEST_FILE)
    assert {"federated/split.safetensors", "model.safetensors"} < set(listed)
    (name,) = (name for name in listed if re.match(r"federated/parties/server/training", name))
    flip_bit(checkpoint / name, place=0.99)
    resumed = split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), **settings)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}' has other bytes than were saved"):
        resumed.train(resume_from_checkpoint=True)
