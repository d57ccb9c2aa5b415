"""Names under which clients are stored, for unusual client ids."""

from __future__ import annotations

import itertools
import re

import pytest

from hf_federated.utils.client_names import MAX_NAME_LENGTH, escape_client_id


UNUSUAL_IDS = [
    "default", "Default", "_64efault", "..", ".", "../../etc/passwd", ".git", "__pycache__", "a/b", "a\\b", "a:b",
    "a*b", "a?b", "<a>", "a|b", 'a"b', "007", "no", "NO", "null", "1e5", "0x1F", "2024-01-01", "~", "-", "--", "-rf",
    " ", "a ", " a", "a\nb", "\0", "zoë", "zoe\u0308", "张伟", "🦊", "CON", "con", "nul", "com1", "lpt9", "com10",
    "anna", "Anna", "a_b", "a-b", "x" * 300, "x" * 301, "é" * 200, "[a]", "{a,b}", "a%2Fb", "train-00000",
]  # fmt: skip


def test_names_are_safe_for_folders_globs_and_configurations():
    for client_id in UNUSUAL_IDS:
        name = escape_client_id(client_id)
        assert re.fullmatch(r"[a-z0-9_][a-z0-9_-]*", name), (client_id, name)
        assert len(name) <= MAX_NAME_LENGTH
        assert name not in {"default", "con", "prn", "aux", "nul", "com1", "lpt9"}


def test_different_clients_have_different_names():
    client_ids = UNUSUAL_IDS + ["".join(letters) for letters in itertools.product("aA_6-", repeat=4)]
    names = [escape_client_id(client_id).casefold() for client_id in client_ids]
    assert len(set(names)) == len(set(client_ids)) == len(client_ids)


def test_simple_ids_are_not_escaped():
    assert [escape_client_id(name) for name in ("0", "17", "hospital-3", "com10")] == [
        "0",
        "17",
        "hospital-3",
        "com10",
    ]


def test_invalid_ids_raise_an_error():
    with pytest.raises(ValueError, match="empty string"):
        escape_client_id("")
    with pytest.raises(ValueError, match="not valid Unicode"):
        escape_client_id("a\ud800b")
