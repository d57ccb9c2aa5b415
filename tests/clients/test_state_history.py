"""`StateHistory` keeps the states of a client after its replies, and returns to each of them."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from hf_federated.clients import MemoryStore
from hf_federated.clients.models import ClientModels
from hf_federated.clients.state_history import StateHistory
from hf_federated.utils.errors import CheckpointError
from hf_federated.utils.storage import StorageError, format_size


class StoredStates(ClientModels):
    """The states of a client without a model."""

    def open(self, client_id):
        raise NotImplementedError

    def get_state(self, client_id):
        return self.store.get(client_id)

    def set_state(self, client_id, state):
        self.store.set(client_id, state)


def start(directory) -> tuple[StoredStates, StateHistory]:
    models = StoredStates(MemoryStore())
    return models, StateHistory(directory, models)


@pytest.fixture
def filled(tmp_path):
    """A folder with the states after three requests."""
    models, history = start(tmp_path)
    for number in range(3):
        models.set_state("north", {"step": torch.tensor(number)})
        history.record(f"request {number}", b"reply %d" % number)
    return tmp_path


def test_new_process_finds_reply_and_state_of_the_last_request(filled):
    models, history = start(filled)
    assert history.reply_to("request 2") == b"reply 2"
    assert history.reply_to("request 3") is None
    history.restore("request 2")
    assert models.get_state("north")["step"] == 2


def test_states_can_be_restored_in_any_order(filled):
    models, history = start(filled)
    for number in (1, 0, 2, 1):
        history.restore(f"request {number}")
        assert models.get_state("north")["step"] == number
    history.restore("")
    assert models.get_state("north") == {}


def test_pruned_states_are_gone_and_kept_states_lose_their_replies(filled):
    models, history = start(filled)
    history.restore("request 2")
    history.prune(["request 0", ""])
    assert history.reply_to("request 2") == b"reply 2" and history.reply_to("request 0") is None
    history.restore("request 0")
    assert models.get_state("north")["step"] == 0
    with pytest.raises(CheckpointError, match="that .* does not contain"):
        history.restore("request 1")


def test_other_files_in_the_folder_are_kept(filled):
    (filled / "notes").mkdir()
    (filled / "notes" / "text.txt").write_text("mine")
    _, history = start(filled)
    history.prune([])
    assert [path.name for path in filled.iterdir()] == ["notes"]


def test_interrupted_write_leaves_the_earlier_states(filled):
    """A process that is killed while it writes leaves a partial folder only."""
    (filled / ".partial").mkdir()
    (filled / ".partial" / "reply.bin").write_bytes(b"half")
    models, history = start(filled)
    models.set_state("north", {"step": torch.tensor(7)})
    history.record("request 3", b"reply 3")
    assert history.reply_to("request 3") == b"reply 3" and history.reply_to("request 2") == b"reply 2"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"north": "00"}'], ids=["empty", "cut", "list", "digest"])
def test_damaged_state_is_named(filled, damage):
    models, history = start(filled)
    (history._folder("request 1") / "digests.json").write_bytes(damage)
    with pytest.raises(CheckpointError, match=str(filled)):
        history.restore("request 1")


@pytest.mark.parametrize("name", ["../../up", "/etc/passwd", "a" * 10_000, "\u0000"])
def test_names_of_the_server_are_not_paths(tmp_path, name):
    _, history = start(tmp_path / "states")
    history.record(name, b"reply")
    assert history.reply_to(name) == b"reply"
    assert [path.name for path in tmp_path.iterdir()] == ["states"]


def test_files_of_a_client_can_be_read_by_their_owner_only(filled):
    files = [path for path in filled.glob("*/*")]
    assert {path.name for path in files} >= {"reply.bin", "digests.json"} and len(files) == 9
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_full_disk_names_folder_and_bytes_and_keeps_the_earlier_states(filled, monkeypatch):
    models, history = start(filled)
    history.restore("request 2")
    before = sorted(filled.glob("*/*"))
    state = sum(path.stat().st_size for path in history._folder("request 2").iterdir()) - len(b"reply 2")

    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as context, pytest.raises(StorageError) as error:
        context.setattr(os, "replace", full)
        history.record("request 3", bytes(5000))
    assert f"Writing to {filled} failed: No space left on device; at least {format_size(5000 + state)}" in str(
        error.value
    )
    assert sorted(filled.glob("*/*")) == before and history.reply_to("request 3") is None
    history.record("request 3", b"reply 3")
    assert start(filled)[1].reply_to("request 3") == b"reply 3"
