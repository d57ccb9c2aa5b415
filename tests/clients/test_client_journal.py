"""A client journal remembers consents in every run and state, and gives no second one."""

from __future__ import annotations

import json
import os
import signal
import stat

import pytest
import torch

from hf_federated.clients import MemoryStore, SharedModel
from hf_federated.clients.journal import ClientJournal, Consent, ConsentError, JournalError, read_journal
from hf_federated.clients.models import ClientModels
from hf_federated.clients.request_record import RequestRecord
from hf_federated.clients.state_history import StateHistory
from hf_federated.messages.validation import MAX_REFUSED_LENGTH


FIT, OTHER_FIT = "0a" * 32, "0b" * 32
CLIENTS, OTHER_CLIENTS = "1a" * 32, "1b" * 32


def agree(journal: ClientJournal, survivors: str = CLIENTS, client_id: str = "north", fit: str = FIT, number: int = 5):
    journal.add_consent(client_id, 0, fit, survivors, number)


@pytest.fixture(params=["memory", "disk"])
def journal(request, tmp_path):
    return ClientJournal(tmp_path if request.param == "disk" else None)


def test_client_consents_to_one_sum_of_a_request(journal):
    agree(journal)
    agree(journal)
    assert journal.consent("north", FIT) == Consent("north", 0, FIT, CLIENTS, 5)
    with pytest.raises(ConsentError, match=r"sum of 5 .*, and refuses a second sum, of 4 clients,") as error:
        agree(journal, OTHER_CLIENTS, number=4)
    text = str(error.value)
    assert "the difference of two sums can be one update" in text
    # The refusal that the log shows has a limited length, and must not lose what to do.
    assert "another `federation_seed`" in text[: MAX_REFUSED_LENGTH - len("is refused: ")]
    assert journal.consent("north", FIT).survivors_digest == CLIENTS


def test_other_requests_and_other_clients_have_their_own_consents(journal):
    agree(journal)
    agree(journal, OTHER_CLIENTS, fit=OTHER_FIT)
    agree(journal, OTHER_CLIENTS, client_id="south")
    assert journal.consent("north", OTHER_FIT).survivors_digest == OTHER_CLIENTS
    assert journal.consent("east", FIT) is None


def test_client_answers_one_request_of_local_training_in_a_round(journal):
    assert journal.fit_digest("north", 0) is None
    journal.note_fit("north", 0, FIT)
    journal.note_fit("north", 0, FIT)
    journal.note_fit("north", 1, OTHER_FIT)
    journal.note_fit("south", 0, OTHER_FIT)
    with pytest.raises(ConsentError, match=r"Round 1: client 'north' has answered .* with other content"):
        journal.note_fit("north", 0, OTHER_FIT)
    assert [journal.fit_digest("north", round) for round in (0, 1, 2)] == [FIT, OTHER_FIT, None]


def test_another_process_has_the_entries(tmp_path):
    journal = ClientJournal(tmp_path, "a run")
    journal.note_fit("north", 3, FIT)
    agree(journal)
    for saved in (None, read_journal(tmp_path)):
        again = ClientJournal(tmp_path, "a run", saved=saved)
        assert again.fit_digest("north", 3) == FIT
        with pytest.raises(ConsentError):
            agree(again, OTHER_CLIENTS)


@pytest.mark.parametrize("change", ["a complete run", "another agreement", "a deleted record"])
def test_consents_survive_a_run_and_noted_requests_do_not(tmp_path, change):
    """A server may start a run again. A deleted record is how the owner of a client agrees to a new run."""
    record = RequestRecord(tmp_path, "agreed")
    journal = ClientJournal(tmp_path)
    journal.run = record.run
    journal.note_fit("north", 0, FIT)
    agree(journal)
    assert RequestRecord(tmp_path, "agreed").run == record.run
    if change == "a complete run":
        record.end()
    elif change == "a deleted record":
        record.path.unlink()
    later = RequestRecord(tmp_path, "other" if change == "another agreement" else "agreed")
    again = ClientJournal(tmp_path, later.run)
    assert again.fit_digest("north", 0) is None
    again.note_fit("north", 0, OTHER_FIT)
    with pytest.raises(ConsentError):
        agree(again, OTHER_CLIENTS)
    assert ClientJournal(tmp_path, later.run).fit_digest("north", 0) == OTHER_FIT


def test_server_that_returns_a_client_to_an_earlier_state_does_not_undo_a_consent(tmp_path):
    class States(SharedModel):
        def __init__(self):
            ClientModels.__init__(self, MemoryStore())

    models, journal = States(), ClientJournal(tmp_path)
    history = StateHistory(tmp_path, models)
    for number in range(2):
        models.set_state("north", {"step": torch.tensor(number)})
        history.record(f"request {number}", b"reply")
        agree(journal, fit=[FIT, OTHER_FIT][number])
    history.restore("request 0")
    history.prune([])
    again = ClientJournal(tmp_path)
    for fit in (FIT, OTHER_FIT):
        with pytest.raises(ConsentError):
            agree(again, OTHER_CLIENTS, fit=fit)


def test_entry_is_on_disk_before_the_client_signs(tmp_path, monkeypatch):
    """Also the folder's entry of the new file is written, because a file without a name is lost."""
    synced = []
    fsync = os.fsync

    def record(descriptor):
        fsync(descriptor)
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", record)
    folder = tmp_path / "state"
    journal = ClientJournal(folder)
    agree(journal)
    assert synced == [str(folder / "journal.jsonl"), str(folder)]
    journal.note_fit("north", 0, FIT)
    assert synced[2:] == [str(folder / "journal.jsonl")]
    agree(journal)
    journal.note_fit("north", 0, FIT)
    assert len(synced) == 3
    assert stat.S_IMODE((folder / "journal.jsonl").stat().st_mode) == 0o600


def test_killed_client_remembers_its_consent(tmp_path):
    child = os.fork()
    if not child:
        agree(ClientJournal(tmp_path))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with pytest.raises(ConsentError):
        agree(ClientJournal(tmp_path), OTHER_CLIENTS)


def test_consent_that_cannot_be_written_is_not_given(tmp_path, monkeypatch):
    journal = ClientJournal(tmp_path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context, pytest.raises(OSError, match=str(tmp_path)):
        context.setattr(os, "fsync", full)
        agree(journal)
    assert journal.consent("north", FIT) is None


def test_only_one_of_several_processes_writes(tmp_path):
    main, other = (ClientJournal(tmp_path, writes=writes, saved=[]) for writes in (True, False))
    for each in (main, other):
        each.note_fit("north", 0, FIT)
        agree(each)
    assert len(read_journal(tmp_path)) == 2
    with pytest.raises(ConsentError):
        agree(other, OTHER_CLIENTS)
    # A process on another machine may see the file later.
    elsewhere = ClientJournal(tmp_path / "not yet visible", writes=False, saved=read_journal(tmp_path))
    with pytest.raises(ConsentError):
        agree(elsewhere, OTHER_CLIENTS)


def test_incomplete_last_line_is_ignored(tmp_path):
    agree(ClientJournal(tmp_path))
    path = tmp_path / "journal.jsonl"
    content = path.read_bytes()
    path.write_bytes(content + content[:-9])
    journal = ClientJournal(tmp_path)
    agree(journal, fit=OTHER_FIT)
    assert len(read_journal(tmp_path)) == 2 and path.read_bytes().startswith(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda entry: b"{", "is damaged"),
        (lambda entry: b"\0" * 40, "is damaged"),
        (lambda entry: b"[]", "is not an entry"),
        (lambda entry: {**entry, "kind": "budget"}, "an entry has the kind 'budget'; known are fit, consent.*later"),
        (lambda entry: {**entry, "kind": ["consent"]}, "an entry has the kind list"),
        (lambda entry: {"round": 1}, "an entry has the kind None"),
        (lambda entry: {**entry, "more": 1}, "'consent' has the fields .*'more'"),
        (lambda entry: {"kind": "consent"}, "'consent' has the fields"),
        (lambda entry: {**entry, "round": -1}, "`round` is -1"),
        (lambda entry: {**entry, "round": True}, "`round` is a value of type bool"),
        (lambda entry: {**entry, "num_survivors": 0}, "`num_survivors` is 0"),
        (lambda entry: {**entry, "fit_digest": "0A" * 32}, "`fit_digest` is '0A.*64 hexadecimal digits"),
        (lambda entry: {**entry, "survivors_digest": "0a" * 32 + "\n"}, "`survivors_digest` is"),
        (lambda entry: {**entry, "client_id": None}, "`client_id` is None"),
    ],
)
def test_damaged_journal_names_the_file_and_what_to_do(tmp_path, change, reason):
    agree(ClientJournal(tmp_path))
    path = tmp_path / "journal.jsonl"
    changed = change(json.loads(path.read_text()))
    path.write_bytes((changed if isinstance(changed, bytes) else json.dumps(changed).encode()) + b"\n")
    with pytest.raises(JournalError, match=reason) as error:
        ClientJournal(tmp_path)
    text = str(error.value)
    assert repr(str(path)) in text and "Restore the file from a backup." in text and "another `state_dir`" in text


@pytest.mark.parametrize("values", [{"survivors": "short"}, {"number": 0}, {"fit": FIT.upper()}])
def test_invalid_entry_is_not_added(journal, values):
    with pytest.raises(ValueError, match="Journal of client 'north': `"):
        agree(journal, **values)
    assert journal.consent("north", values.get("fit", FIT)) is None
