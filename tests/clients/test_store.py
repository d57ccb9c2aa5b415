"""Both stores keep trees apart, hand out copies, and write checkpoints that later rounds do not change."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
import torch

from hf_federated.clients import DiskStore, MemoryStore


@pytest.fixture(params=["memory", "disk"])
def new_store(request, tmp_path):
    """Makes stores of one kind, each with a place of its own."""
    numbers = iter(range(100))

    def make():
        return MemoryStore() if request.param == "memory" else DiskStore(tmp_path / "stores" / str(next(numbers)))

    return make


@pytest.fixture
def store(new_store):
    return new_store()


def tree(value: float = 1.0) -> dict:
    """As an optimizer's state is: integer keys, tuples, scalars and tensors."""
    return {
        "optimizer": {
            "state": {0: {"step": torch.tensor(value), "exp_avg": torch.full((2, 2), value)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
        },
        "algorithm": {"control": {"layer.weight": torch.full((3,), value, dtype=torch.bfloat16)}},
    }


def assert_is(state, value: float) -> None:
    expected = tree(value)
    assert list(state) == list(expected)
    assert state["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    for name, tensor in expected["optimizer"]["state"][0].items():
        assert torch.equal(state["optimizer"]["state"][0][name], tensor)
    control = state["algorithm"]["control"]["layer.weight"]
    assert control.dtype == torch.bfloat16 and torch.equal(control, expected["algorithm"]["control"]["layer.weight"])


def test_a_client_that_keeps_nothing_has_an_empty_tree(store):
    assert store.get("a") == {}


def test_clients_are_kept_apart(store):
    store.set("a", tree(1.0))
    store.set("b", tree(2.0))
    assert_is(store.get("a"), 1.0)
    assert_is(store.get("b"), 2.0)
    assert store.get("c") == {}


def test_a_tree_is_replaced_as_a_whole(store):
    store.set("a", tree(1.0))
    store.set("a", {"step": 3})
    assert store.get("a") == {"step": 3}


def test_what_is_got_is_a_copy(store):
    store.set("a", tree(1.0))
    for _ in range(2):
        state = store.get("a")
        state["optimizer"]["state"][0]["exp_avg"].zero_()
        state["optimizer"]["param_groups"][0]["lr"] = 9.0
        state["optimizer"]["param_groups"].append({})
        del state["algorithm"]
        assert_is(store.get("a"), 1.0)


def test_clear_forgets_every_client(store):
    store.clear()
    store.set("a", tree())
    store.clear()
    assert store.get("a") == {}
    store.set("a", tree(2.0))
    assert_is(store.get("a"), 2.0)


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


def test_any_text_is_a_client_id(store, new_store, tmp_path):
    for number, client_id in enumerate(IDS):
        store.set(client_id, {"number": number})
    saved = tmp_path / "saved"
    saved.mkdir()
    loaded = new_store()
    loaded.load(saved, store.save(saved))
    for instance in (store, loaded):
        assert [instance.get(client_id)["number"] for client_id in IDS] == list(range(len(IDS)))
    assert len(list(saved.iterdir())) == len(IDS)
    assert {path.name for path in tmp_path.iterdir()} <= {"saved", "stores"}  # nothing went elsewhere


def test_a_checkpoint_gives_back_what_was_saved(store, new_store, tmp_path):
    store.set("a", tree(1.0))
    store.set("b", tree(2.0))
    loaded = new_store()
    loaded.set("a", tree(5.0))
    loaded.set("only here", tree(6.0))
    loaded.load(tmp_path, store.save(tmp_path))
    assert_is(loaded.get("a"), 1.0)
    assert_is(loaded.get("b"), 2.0)
    assert loaded.get("only here") == {}


def test_an_empty_store_saves_nothing_and_loads_nothing(store, new_store, tmp_path):
    loaded = new_store()
    loaded.set("a", tree())
    loaded.load(tmp_path, store.save(tmp_path))
    assert loaded.get("a") == {}


def test_later_rounds_do_not_change_a_checkpoint(store, new_store, tmp_path):
    """Disk stores link the files of a checkpoint instead of copying them."""
    store.set("a", tree(1.0))
    store.set("b", tree(1.0))
    digests = store.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    store.set("a", tree(2.0))
    store.clear()
    store.set("b", tree(3.0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    # Nor does a run that goes on from it.
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


def test_the_digests_are_those_of_the_files(store, new_store, tmp_path):
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


def test_a_checkpoint_may_be_read_in_part(store, new_store, tmp_path):
    store.set("a", tree(1.0))
    store.set("b", tree(2.0))
    digests = store.save(tmp_path)
    loaded = new_store()
    loaded.load(tmp_path, {"b": digests["b"]})
    assert loaded.get("a") == {}
    assert_is(loaded.get("b"), 2.0)


@pytest.mark.parametrize("damage", ["missing", "cut short", "another's"])
def test_a_checkpoint_that_is_not_whole_is_refused_by_the_clients_name(store, new_store, tmp_path, damage):
    store.set("a", tree(1.0))
    digests = store.save(tmp_path)
    (file,) = [path for path in tmp_path.iterdir() if path.is_file()]
    if damage == "missing":
        file.unlink()
    elif damage == "cut short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        # Of another moment, and of the same size. A new file, since a disk store links the old one.
        size = file.stat().st_size
        file.unlink()
        other = new_store()
        other.set("a", tree(2.0))
        other.save(tmp_path)
        assert file.stat().st_size == size
    what = "is missing" if damage == "missing" else "is another file than was saved"
    with pytest.raises(ValueError, match=f"client 'a' keeps, '.*{file.name}', {what}"):
        new_store().load(tmp_path, digests)


# ---- On disk


def test_a_checkpoint_costs_no_copy_on_disk(tmp_path):
    store = DiskStore(tmp_path / "store")
    store.set("a", tree())
    (tmp_path / "saved").mkdir()
    store.save(tmp_path / "saved")
    (saved,) = (tmp_path / "saved").iterdir()
    assert os.stat(saved).st_nlink == 2


def test_files_are_copied_where_links_do_not_exist(tmp_path, monkeypatch):
    def no_links(source, target):
        raise OSError("not supported")

    store = DiskStore(tmp_path / "store")
    store.set("a", tree(1.0))
    (tmp_path / "saved").mkdir()
    monkeypatch.setattr(os, "link", no_links)
    loaded = DiskStore(tmp_path / "loaded")
    loaded.load(tmp_path / "saved", store.save(tmp_path / "saved"))
    assert_is(loaded.get("a"), 1.0)


def test_a_file_left_half_written_is_no_state(tmp_path):
    store = DiskStore(tmp_path / "store")
    store.set("a", tree(1.0))
    (file,) = store.directory.iterdir()
    file.with_suffix(".partial").write_bytes(b"half")
    (tmp_path / "saved").mkdir()
    store.save(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [file.name]
    assert_is(store.get("a"), 1.0)


def test_a_store_goes_on_where_its_directory_stands(tmp_path):
    DiskStore(tmp_path / "store").set("a", tree(1.0))
    assert_is(DiskStore(tmp_path / "store").get("a"), 1.0)


def test_an_error_of_the_disk_names_the_file_and_what_to_change(tmp_path):
    (tmp_path / "in the way").write_text("")
    store = DiskStore(tmp_path / "in the way")
    with pytest.raises(FileExistsError, match=r"client_store='memory'.*in the way/\w+\.safetensors'"):
        store.set("a", tree())


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(path, blob):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left.*make room.*/\w+\.safetensors'"):
        DiskStore(tmp_path / "store").set("a", tree())


def test_a_damaged_file_is_named(tmp_path):
    store = DiskStore(tmp_path / "store")
    store.set("a", tree())
    (file,) = store.directory.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{file.name}': .*damaged"):
        store.get("a")
