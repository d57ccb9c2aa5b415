"""A save replaces a complete federated dataset or leaves the folder unchanged, also after a kill or an error."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from stored_clients import files, same

from hf_federated import FederatedDataset
from hf_federated.data.storage import folder as folder_module


def test_save_replaces_a_federated_dataset_but_no_foreign_files(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    assert list(FederatedDataset.load_from_disk(tmp_path / "clients")) == ["no"]
    assert [path.name for path in (tmp_path / "clients" / "data").iterdir()] == ["no"]
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("...")
    (tmp_path / "file").write_text("...")
    for place in ("other", "file"):
        with pytest.raises(FileExistsError, match="is or contains something else than a federated dataset"):
            clients.save_to_disk(tmp_path / place)
    # A foreign file in the folder of a federated dataset, and a file of another tool with the name partition.json.
    (tmp_path / "clients" / "data" / "codebook.csv").write_text("...")
    with pytest.raises(FileExistsError, match="data/codebook.csv"):
        clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "other" / "partition.json").write_text("{}")
    with pytest.raises(FileExistsError, match="is or contains something else than a federated dataset"):
        clients.save_to_disk(tmp_path / "other")
    assert (tmp_path / "other" / "thesis.tex").read_text() == "..."
    assert (tmp_path / "clients" / "data" / "codebook.csv").read_text() == "..."


def test_save_follows_symlinks_and_rejects_the_current_directory(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    (tmp_path / "link").symlink_to("clients")
    clients.select_clients(["no"]).save_to_disk(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert list(FederatedDataset.load_from_disk(tmp_path / "clients")) == ["no"]
    monkeypatch.chdir(tmp_path / "clients" / "data")
    for place in (".", tmp_path / "clients"):
        with pytest.raises(ValueError, match="is or contains the current directory"):
            clients.save_to_disk(place)


def test_failed_save_keeps_the_existing_folder(clients, tmp_path):
    clients.save_to_disk(tmp_path / "clients")
    before = files(tmp_path / "clients")
    stream = IterableDataset.from_generator(lambda: iter([{"who": "b", "text": "t", "label": 0}]))
    with pytest.raises(TypeError, match="IterableDataset"):
        FederatedDataset.from_dict({"b": stream}).save_to_disk(tmp_path / "clients")
    with pytest.raises(ValueError, match="no column 'stars'"):
        clients.save_to_disk(tmp_path / "clients", label_column="stars")
    with pytest.raises(ValueError, match="is not a valid split name"):
        clients.save_to_disk(tmp_path / "clients", split="../train")
    assert files(tmp_path / "clients") == before
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


def test_killed_save_keeps_the_old_folder(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    before = files(tmp_path / "clients")
    write = folder_module._write_shards

    def killed(folder, name, *args):
        if name == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(folder, name, *args)

    monkeypatch.setattr(folder_module, "_write_shards", killed)
    replacement = FederatedDataset.from_dict({str(i): Dataset.from_dict({"text": ["a"]}) for i in range(5)})
    process = multiprocessing.get_context("fork").Process(
        target=replacement.save_to_disk, args=(tmp_path / "clients",)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert files(tmp_path / "clients") == before
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)


def test_error_after_save_killed_between_renames_names_the_old_folder(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    rename = os.rename

    def killed(source, target):
        if Path(source).name == "new":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    replacement = clients.select_clients(["no"])
    process = multiprocessing.get_context("fork").Process(
        target=replacement.save_to_disk, args=(tmp_path / "clients",)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="The previous version is in (.*); move it back") as caught:
        FederatedDataset.load_from_disk(tmp_path / "clients")
    monkeypatch.undo()
    os.rename(str(caught.value).split("version is in ")[1].split("; move")[0], tmp_path / "clients")
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)


def refuse_renames(monkeypatch, refused, error: OSError) -> None:
    """Make `os.rename(source, target)` raise `error` if `refused(source, target)` is true."""
    rename = os.rename

    def failing(source, target):
        if refused(Path(source), Path(target)):
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)


def test_failed_rename_restores_the_old_folder(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    refuse_renames(monkeypatch, lambda source, target: source.name == "new", OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    assert same(FederatedDataset.load_from_disk(tmp_path / "clients"), clients)
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]


def test_old_folder_that_cannot_be_restored_is_kept(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    refuse_renames(monkeypatch, lambda source, target: target.name == "clients", OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        clients.select_clients(["no"]).save_to_disk(tmp_path / "clients")
    monkeypatch.undo()
    (kept,) = tmp_path.glob(".clients-*/old")
    assert same(FederatedDataset.load_from_disk(kept), clients)


def test_rename_error_names_the_folder_and_mentions_mount_points(clients, tmp_path, monkeypatch):
    clients.save_to_disk(tmp_path / "clients")
    busy = OSError(errno.EBUSY, "Device or resource busy")
    refuse_renames(monkeypatch, lambda source, target: source.name == "clients", busy)
    with pytest.raises(OSError, match="a mount point cannot be replaced.*clients"):
        clients.save_to_disk(tmp_path / "clients")
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
