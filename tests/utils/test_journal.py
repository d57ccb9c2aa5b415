"""A journal keeps the entries that were appended before a kill."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from hf_federated.utils.journal import Journal


ENTRIES = [{"round": 0}, {"round": 1, "text": "line\nbreak \u2028 ä"}]


def test_entries_are_read_by_another_process(tmp_path):
    path = tmp_path / "folder" / "journal.jsonl"
    Journal(path).append(ENTRIES[:1])
    Journal(path).append(ENTRIES[1:])
    assert Journal(path).read() == ENTRIES


@pytest.mark.parametrize("length", range(1, 12))
def test_incomplete_last_line_is_ignored_and_overwritten(tmp_path, length):
    path = tmp_path / "journal.jsonl"
    Journal(path).append(ENTRIES)
    content = path.read_bytes()
    path.write_bytes(content[:-length])
    assert Journal(path).read() == ENTRIES[:1]
    Journal(path).append(ENTRIES[1:])
    assert path.read_bytes() == content


def test_replaced_entries_are_followed_by_appended_ones(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append([*ENTRIES, *ENTRIES])
    journal.replace(ENTRIES[:1])
    journal.append(ENTRIES[1:])
    assert journal.read() == ENTRIES
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


@pytest.mark.parametrize("line", [b"[]", b"{", b"\xff", b"[" * 100_000])
def test_damaged_line_names_the_file(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(ValueError, match="journal.jsonl' is damaged"):
        Journal(path).read()


def test_only_the_owner_reads_the_file(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    for write in (journal.append, journal.replace):
        write(ENTRIES)
        assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("write", ["append", "replace"])
def test_name_of_a_new_file_is_on_disk(tmp_path, monkeypatch, write):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    getattr(Journal(tmp_path / "journal.jsonl"), write)(ENTRIES)
    assert synced[-1] == str(tmp_path) and len(synced) == 2


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_file_system_that_cannot_sync_a_folder_is_allowed(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    journal = Journal(tmp_path / "journal.jsonl")
    if number == errno.EINVAL:
        journal.append(ENTRIES)
        assert journal.read() == ENTRIES
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            journal.append(ENTRIES)
