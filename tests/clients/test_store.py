"""Client stores: separate states, copies on read, and checkpoints that later rounds do not change."""

from __future__ import annotations

import errno
import hashlib
import os

import pytest
import torch

from hf_federated.clients import DiskStore, MemoryStore
from hf_federated.utils.storage import StorageError


@pytest.fixture(params=["memory", "disk"])
def new_store(request, tmp_path):
    """Creates stores of one kind, each with its own directory."""
    numbers = iter(range(100))

    def make():
        return MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "stores" / str(next(numbers)))

    return make


@pytest.fixture
def store(new_store):
    return new_store()


def tree(value: float = 1.0) -> dict:
    """A tree like an optimizer state: integer keys, tuples, scalars and tensors."""
    return {
        "optimizer": {
            "state": {0: {"step": torch.tensor(value), "exp_avg": torch.full((2, 2), value)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
        },
        "algorithm": {"control": {"layer.weight": torch.full((3,), value, dtype=torch.bfloat16)}},
    }


def assert_tree_equals(state, value: float) -> None:
    expected = tree(value)
    assert list(state) == list(expected)
    assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for name, tensor in expected["optimizer"]["state"][0].items():
        assert torch.equal(state["optimizer"]["state"][0][name], tensor)
    control = state["algorithm"]["control"]["layer.weight"]
    assert control.dtype == torch.bfloat16 and torch.equal(control, expected["algorithm"]["control"]["layer.weight"])


def test_client_without_state_has_an_empty_tree(store):
    assert store.get("a") == {}


def test_states_of_clients_are_separate(store):
    store.set("a", tree(1.0))
    store.set("b", tree(2.0))
    assert_tree_equals(store.get("a"), 1.0)
    assert_tree_equals(store.get("b"), 2.0)
    assert store.get("c") == {}


def test_set_replaces_the_whole_tree(store):
    store.set("a", tree(1.0))
    store.set("a", {"step": 3})
    assert store.get("a") == {"step": 3}


def test_get_returns_a_copy(store):
    store.set("a", tree(1.0))
    for _ in range(2):
        state = store.get("a")
        state["optimizer"]["state"][0]["exp_avg"].zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 9.0
        state["optimizer"]["param_groups"].append({})
        del state["algorithm"]
        assert_tree_equals(store.get("a"), 1.0)


def test_clear_deletes_all_states(store):
    store.clear()
    store.set("a", tree())
    store.clear()
    assert store.get("a") == {}
    store.set("a", tree(2.0))
    assert_tree_equals(store.get("a"), 2.0)


IDS = [
    "a",
    "A",
    "",
    " ",
    ".",
    "..",
    "../../outside",
    "/absolute",
    "with/slash\\and\x00nul",
    "CON",
    "long" * 500,
    "süd€\U0001f600",
    "a.safetensors",
    "line\nbreak",
    "\u00e9",
    "e\u0301",
]


def test_any_string_is_a_valid_client_id(store, new_store, tmp_path):
    for number, client_id in enumerate(IDS):
        store.set(client_id, {"number": number})
    saved = tmp_path / "saved"
    saved.mkdir()
    loaded = new_store()
    loaded.load(saved, store.save(saved))
    for instance in (store, loaded):
        assert [instance.get(client_id)["number"] for client_id in IDS] == list(range(len(IDS)))
    assert len(list(saved.iterdir())) == len(IDS)
    assert {path.name for path in tmp_path.iterdir()} <= {
        "saved",
        "stores",
    }  # no file elsewhere


def test_load_restores_saved_states(store, new_store, tmp_path):
    store.set("a", tree(1.0))
    store.set("b", tree(2.0))
    loaded = new_store()
    loaded.set("a", tree(5.0))
    loaded.set("only here", tree(6.0))
    loaded.load(tmp_path, store.save(tmp_path))
    assert_tree_equals(loaded.get("a"), 1.0)
    assert_tree_equals(loaded.get("b"), 2.0)
    assert loaded.get("only here") == {}


def test_empty_store_saves_and_loads_an_empty_checkpoint(store, new_store, tmp_path):
    loaded = new_store()
    loaded.set("a", tree())
    loaded.load(tmp_path, store.save(tmp_path))
    assert loaded.get("a") == {}


def test_later_rounds_do_not_change_a_checkpoint(store, new_store, tmp_path):
    """A checkpoint has hard links to the files of a disk store, so the store must not modify files in place."""
    store.set("a", tree(1.0))
    store.set("b", tree(1.0))
    digests = store.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    store.set("a", tree(2.0))
    store.clear()
    store.set("b", tree(3.0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    # A run that resumes from the checkpoint does not change it either.
    resumed = new_store()
    resumed.load(tmp_path, digests)
    resumed.set("a", tree(4.0))
    resumed.clear()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_both_stores_write_the_same_checkpoint(tmp_path):
    files = []
    for store in (MemoryStore(), DiskStore(tmp_path / "store")):
        store.set("a", tree(1.0))
        directory = tmp_path / type(store).__name__
        directory.mkdir()
        store.save(directory)
        files.append({path.name: path.read_bytes() for path in directory.iterdir()})
    assert files[0] == files[1]


def test_save_returns_the_digests_of_the_files(store, new_store, tmp_path):
    store.set("a", tree(1.0))
    store.set("b", tree(2.0))
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    before = store.save(first)
    resumed = new_store()
    resumed.load(first, before)
    resumed.set("b", tree(3.0))
    after = resumed.save(second)
    assert before["a"] == after["a"] and before["b"] != after["b"]
    for directory, digests in ((first, before), (second, after)):
        files = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir())
        assert sorted(digests.values()) == files


def test_load_can_read_some_clients_of_a_checkpoint(store, new_store, tmp_path):
    store.set("a", tree(1.0))
    store.set("b", tree(2.0))
    digests = store.save(tmp_path)
    loaded = new_store()
    loaded.load(tmp_path, {"b": digests["b"]})
    assert loaded.get("a") == {}
    assert_tree_equals(loaded.get("b"), 2.0)


@pytest.mark.parametrize("damage", ["missing", "cut short", "another state"])
def test_damaged_checkpoint_is_refused_and_names_the_client(store, new_store, tmp_path, damage):
    store.set("a", tree(1.0))
    digests = store.save(tmp_path)
    (file,) = [path for path in tmp_path.iterdir() if path.is_file()]
    if damage == "missing":
        file.unlink()
    elif damage == "cut short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        # A state of the same size. Delete the old file first, because a disk store has a hard link to it.
        size = file.stat().st_size
        file.unlink()
        other = new_store()
        other.set("a", tree(2.0))
        other.save(tmp_path)
        assert file.stat().st_size == size
    reason = "is missing" if damage == "missing" else "differs from the file that was saved"
    with pytest.raises(ValueError, match=f"client 'a', '.*{file.name}', {reason}"):
        new_store().load(tmp_path, digests)


# ---- Disk store


def test_checkpoint_of_disk_store_uses_hard_links(tmp_path):
    store = DiskStore(tmp_path / "store")
    store.set("a", tree())
    (tmp_path / "saved").mkdir()
    store.save(tmp_path / "saved")
    (saved,) = (tmp_path / "saved").iterdir()
    assert os.stat(saved).st_nlink == 2


def test_files_are_copied_if_hard_links_are_not_supported(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError("not supported")

    store = DiskStore(tmp_path / "store")
    store.set("a", tree(1.0))
    (tmp_path / "saved").mkdir()
    monkeypatch.setattr(os, "link", no_links)
    loaded = DiskStore(tmp_path / "loaded")
    loaded.load(tmp_path / "saved", store.save(tmp_path / "saved"))
    assert_tree_equals(loaded.get("a"), 1.0)


def test_partially_written_file_is_ignored(tmp_path):
    """A killed process can leave a `.partial` file."""
    store = DiskStore(tmp_path / "store")
    store.set("a", tree(1.0))
    (file,) = store.directory.iterdir()
    file.with_suffix(".partial").write_bytes(b"half")
    (tmp_path / "saved").mkdir()
    store.save(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [file.name]
    assert_tree_equals(store.get("a"), 1.0)


def test_new_store_reads_states_in_an_existing_directory(tmp_path):
    DiskStore(tmp_path / "store").set("a", tree(1.0))
    assert_tree_equals(DiskStore(tmp_path / "store").get("a"), 1.0)


def test_disk_error_names_the_file_and_the_remedy(tmp_path):
    (tmp_path / "in the way").write_text("")
    store = DiskStore(tmp_path / "in the way")
    with pytest.raises(FileExistsError, match=r"client_store='memory'.*in the way/\w+\.safetensors'"):
        store.set("a", tree())


def test_full_disk_error_names_folder_and_bytes(tmp_path, monkeypatch):
    """The operating system's error for a full disk does not name a file."""

    def full(path, mode):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "chmod", full)
    expected = rf"{tmp_path / 'store'} failed: No space left.* at least [\d.]+ \w+ are needed.*client_store='memory'"
    with pytest.raises(StorageError, match=expected):
        DiskStore(tmp_path / "store").set("a", tree())
    assert list((tmp_path / "store").iterdir()) == []


def test_states_can_be_read_by_their_owner_only(tmp_path, monkeypatch):
    store, memory = DiskStore(tmp_path / "store"), MemoryStore()
    for each, name in ((store, "linked"), (memory, "written")):
        each.set("a", tree())
        (tmp_path / name).mkdir()
        each.save(tmp_path / name)

    def no_links(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "copied").mkdir()
    store.save(tmp_path / "copied")
    files = list(tmp_path.glob("*/*"))
    assert len(files) == 4 and all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_damaged_file_is_named(tmp_path):
    store = DiskStore(tmp_path / "store")
    store.set("a", tree())
    (file,) = store.directory.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{file.name}': .*damaged"):
        store.get("a")
