"""A full or read-only disk ends a command with one line that names the folder, the bytes and `--resume`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hf_federated.cli.main import main


def mount(path: Path, *options: str) -> bool:
    return subprocess.run(["mount", *options, str(path)], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a file system of some bytes."""
    path = tmp_path / "disk"
    path.mkdir()

    def create(num_bytes: int) -> Path:
        if not mount(path, "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs"):
            pytest.skip("only root can mount a small file system")
        return path

    yield create
    subprocess.run(["umount", "-l", str(path)], capture_output=True)


@pytest.fixture(scope="module")
def large_model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1.2 MB, so that its checkpoints are larger than all other files."""
    folder = tmp_path_factory.mktemp("large")
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = BertConfig.from_pretrained(model_dir)
    config.intermediate_size = 3000
    BertModel(config).save_pretrained(folder)
    return folder


def line_of(text: str) -> str:
    """The line of the error, which is the last one. There is no traceback."""
    assert "Traceback" not in text
    return text.strip().splitlines()[-1]


def test_disk_that_is_full_during_the_run_ends_it_in_one_line_and_a_resumed_run_completes(
    disk, recipe_path, large_model, capsys, caplog
):
    folder = disk(2_300_000) / "run"
    command = ["train", str(recipe_path), "--output-dir", str(folder)]
    training = ("training.save_strategy=steps", "training.save_total_limit=1", "federation.num_rounds=2")
    for setting in (f"model.name_or_path={large_model}", *training):
        command += ["--set", setting]
    assert main(command) == 2
    line = line_of(capsys.readouterr().err)
    assert line.startswith(f"hf-federated: error: Writing to {folder} failed: No space left on device; at least ")
    assert "MB are needed, " in line and " are free. Free disk space" in line and "--resume" in line
    assert mount(folder.parent, "-o", "remount,size=20m")
    resume = ["--resume"] if list(folder.glob("checkpoint-*")) else []
    assert resume
    assert main([*command, *resume]) == 0
    # The arithmetic was known before the first round: a new checkpoint is written before the old one is deleted.
    (warning,) = [record.message for record in caplog.records if "save_total_limit=1" in record.message]
    assert "2 of them need 2." in warning


def test_disk_without_space_for_one_checkpoint_is_reported_before_training(disk, recipe_path, large_model, capsys):
    folder = disk(1_000_000) / "run"
    command = ["train", str(recipe_path), "--output-dir", str(folder), "--set", f"model.name_or_path={large_model}"]
    command += ["--set", "training.save_strategy=steps"]
    assert main(command) == 2
    line = line_of(capsys.readouterr().err)
    assert f"The output folder {folder} has " in line and "a checkpoint has at least 1.2 MB: at least " in line
    assert "are missing. Free disk space, choose another output folder, or set save_strategy='no'" in line
    assert not folder.exists() or not list(folder.glob("checkpoint-*"))


def test_read_only_folder_ends_training_in_one_line(disk, recipe_path, capsys):
    folder = disk(10**6) / "run"
    folder.mkdir()
    assert mount(folder.parent, "-o", "remount,ro")
    assert main(["train", str(recipe_path), "--output-dir", str(folder)]) == 2
    line = line_of(capsys.readouterr().err)
    assert f"Writing to {folder} failed: Read-only file system; " in line and "Make the folder writable" in line
    assert "--resume" in line


def test_read_only_parent_ends_training_in_one_line(disk, recipe_path, capsys):
    folder = disk(10**6) / "new" / "run"
    assert mount(folder.parent.parent, "-o", "remount,ro")
    assert main(["train", str(recipe_path), "--output-dir", str(folder)]) == 2
    assert f"Writing to {folder} failed: Read-only file system; " in line_of(capsys.readouterr().err)
