"""`StateHistory` keeps the states of a client after its replies, and returns to each of them."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from distillation_setup import distillation_trainer
from federations import CLIENTS, build_federation

from hf_federated import FederatedDataset
from hf_federated.clients import ClientStore, DiskStore, MemoryStore, SharedModel, state_history
from hf_federated.clients.models import ClientModels
from hf_federated.clients.state_history import StateHistory
from hf_federated.engines import LocalEngine
from hf_federated.utils.errors import CheckpointError
from hf_federated.utils.storage import StorageError, format_size


class StoredStates(SharedModel):
    """The states of a client without a model."""

    def __init__(self, store):
        ClientModels.__init__(self, store)


def start(directory, store=None) -> tuple[StoredStates, StateHistory]:
    models = StoredStates(MemoryStore() if store is None else store)
    return models, StateHistory(directory, models)


def folder_of(history: StateHistory, name: str) -> Path:
    return history._folder(name)


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
    (folder_of(history, "request 1") / "digests.json").write_bytes(damage)
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


@pytest.mark.parametrize("is_changed", [True, False], ids=["changed state", "same state"])
def test_full_disk_names_folder_and_bytes_and_keeps_the_earlier_states(filled, monkeypatch, is_changed):
    models, history = start(filled)
    history.restore("request 2")
    before = sorted(filled.glob("*/*"))
    state = sum(path.stat().st_size for path in folder_of(history, "request 2").iterdir()) - len(b"reply 2")
    if is_changed:
        models.set_state("north", {"step": torch.tensor(3)})
    else:
        state = 0

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


def inodes(history: StateHistory, name: str) -> dict[str, int]:
    """The files of a state without its reply."""
    return {path.name: path.stat().st_ino for path in folder_of(history, name).iterdir() if path.name != "reply.bin"}


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_state_that_five_replies_do_not_change_is_written_once(tmp_path, kind):
    """Secure aggregation asks a client about five times in a round, and its optimizer can have hundreds of MB."""
    models, history = start(tmp_path / "states", DiskStore(tmp_path / "store") if kind == "disk" else None)
    models.set_state("north", {"optimizer": torch.ones(250_000)})
    for number in range(5):
        history.record(f"request {number}", b"reply %d" % number)
    assert len({tuple(inodes(history, f"request {number}").values()) for number in range(5)}) == 1
    files = {path.stat().st_ino: path.stat().st_size for path in (tmp_path / "states").glob("*/*")}
    assert 1_000_000 < sum(files.values()) < 1_010_000
    for number in range(5):
        new, reader = start(tmp_path / "states")
        reader.restore(f"request {number}")
        assert torch.equal(new.get_state("north")["optimizer"], torch.ones(250_000))
        assert reader.reply_to(f"request {number}") == b"reply %d" % number


def change_by_set(models, history):
    models.set_state("north", {"step": torch.tensor(7)})


def change_by_equal_set(models, history):
    models.set_state("north", models.get_state("north"))


def change_by_remove(models, history):
    models.store.remove("north")


def change_by_clear(models, history):
    models.clear()


def change_by_load(models, history):
    folder = folder_of(history, "request 0")
    models.load(folder, json.loads((folder / "digests.json").read_text()))


def change_by_another_restore(models, history):
    history.restore("request 0")


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize(
    ("change", "step"),
    [
        (change_by_set, 7),
        (change_by_equal_set, 2),
        (change_by_remove, None),
        (change_by_clear, None),
        (change_by_load, 0),
        (change_by_another_restore, 0),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_change_of_a_state_is_recorded(filled, tmp_path_factory, kind, change, step):
    store = DiskStore(tmp_path_factory.mktemp("store")) if kind == "disk" else MemoryStore()
    models, history = start(filled, store)
    history.restore("request 2")
    change(models, history)
    history.record("request 3", b"reply 3")
    models, history = start(filled)
    history.restore("request 3")
    assert models.get_state("north") == ({} if step is None else {"step": torch.tensor(step)})


class OwnStore(ClientStore):
    """A store that a user has written, with a state that changes in place."""

    def __init__(self):
        self.state = {"step": torch.tensor(0)}

    def save(self, directory):
        store = MemoryStore()
        store.set("north", {"step": self.state["step"].clone()})
        return store.save(directory)

    get = set = remove = __contains__ = clear = load = lambda self, *values: NotImplemented


def test_store_that_does_not_count_its_changes_is_written_each_time(tmp_path):
    models, history = start(tmp_path, OwnStore())
    history.record("request 0", b"reply 0")
    models.store.state["step"] += 1
    history.record("request 1", b"reply 1")
    models, history = start(tmp_path)
    history.restore("request 1")
    assert models.get_state("north")["step"] == 1


class Recording(LocalEngine):
    """Records the states after each reply, and compares the record with the states that the clients have."""

    def __init__(self, folder: Path) -> None:
        super().__init__(serialize=True)
        self.folder, self.history = folder, None
        # Whether the state after each request was written, by its kind.
        self.written: dict[str, set[bool]] = {}

    def start(self, context):
        super().start(context)
        self.history = StateHistory(self.folder / "states", self.worker.models)
        self.worker.handle = functools.partial(self.handle, self.worker.handle)

    def handle(self, answer, message):
        models = self.worker.models
        reply, before, name = answer(message), self.history.current, message.nonce
        self.history.record(name, reply.to_bytes())
        known = inodes(self.history, before) if before else {}
        self.written.setdefault(message.kind, set()).add(inodes(self.history, name) != known)
        (self.folder / name).mkdir()
        num_changes = models.store.num_changes
        expected = models.save(self.folder / name)
        models.store.num_changes = num_changes  # the comparison is no change
        assert json.loads((folder_of(self.history, name) / "digests.json").read_text()) == expected
        return reply


@pytest.mark.parametrize(
    ("method", "written"),
    [
        ("dsfl", {"fit": {True}, "predict": {True}, "distill": {True}}),
        ("fedid", {"fit": {True}, "predict": {True}, "feedback": {True}}),
    ],
)
def test_each_training_and_distillation_of_own_models_is_recorded(tmp_path, method, written):
    engine = Recording(tmp_path)
    distillation_trainer(
        tmp_path / "run", method, federation={"max_resident_clients": 2, "num_rounds": 1}, engine=engine
    ).train()
    assert engine.written == written


@pytest.mark.parametrize("carried", ["carry", "reset"])
def test_evaluation_of_a_shared_model_writes_no_state(tmp_path, carried):
    engine = Recording(tmp_path)
    settings = {"client_optimizer_state": carried, "evaluate_clients": True}
    arguments = {"engine": engine, "eval_dataset": FederatedDataset.from_dict(CLIENTS)}
    trainer = build_federation(tmp_path / "run", CLIENTS, federation=settings, trainer=arguments)
    trainer.train()
    trainer.evaluate()
    assert engine.written["fit"] == ({True} if carried == "carry" else {True, False})
    assert engine.written["evaluate"] == {False}


def test_pruned_states_leave_the_files_that_they_share(tmp_path):
    models, history = start(tmp_path)
    models.set_state("north", {"step": torch.tensor(3)})
    for number in range(4):
        history.record(f"request {number}", b"reply %d" % number)
        history.prune([])
    history.record("request 4", b"reply 4")
    history.prune(["request 3"], ["request 3"])
    assert inodes(history, "request 4") == inodes(history, "request 3")
    assert len(list(tmp_path.iterdir())) == 2
    models, history = start(tmp_path)
    history.restore("request 4")
    assert models.get_state("north")["step"] == 3


def test_deleted_current_state_is_written_again(filled):
    models, history = start(filled)
    history.restore("request 2")
    shutil.rmtree(folder_of(history, "request 2"))
    history.record("request 3", b"reply 3")
    models, history = start(filled)
    history.restore("request 3")
    assert models.get_state("north")["step"] == 2


@pytest.mark.parametrize("moment", ["before the link", "after the link", "before the rename", "after the rename"])
def test_client_that_is_killed_while_it_links_has_a_complete_state_or_none(filled, monkeypatch, moment):
    function, name = {"link": (state_history, "link_or_copy"), "rename": (Path, "rename")}[moment.split()[-1]]
    original = getattr(function, name)

    def kill(*paths):
        if moment.startswith("after"):
            original(*paths)
        os.kill(os.getpid(), signal.SIGKILL)

    def record() -> None:
        _, history = start(filled)
        history.restore("request 2")
        with monkeypatch.context() as context:
            context.setattr(function, name, kill)
            history.record("request 3", b"reply 3")

    child = os.fork()
    if not child:
        try:
            signal.alarm(30)
            record()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    models, history = start(filled)
    assert history.has_state("request 3") == (moment == "after the rename")
    assert history.reply_to("request 3") == (b"reply 3" if moment == "after the rename" else None)
    history.restore("request 3" if history.has_state("request 3") else "request 2")
    assert models.get_state("north")["step"] == 2
    history.record("request 3", b"reply 3")
    assert inodes(history, "request 3") == inodes(history, "request 2")
