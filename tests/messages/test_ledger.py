"""Ledger: sums by client and by round, and serialization to a file."""

from __future__ import annotations

import json

import pytest

from hf_federated import Ledger
from hf_federated.messages.ledger import LEDGER_NAME


# (round, client, down, up), in no particular order of rounds.
ENTRIES = [(1, "b", 10, 1), (0, "a", 100, 40), (0, "b", 100, 0), (0, "b", 0, 60), (10, "a", 7, 0)]


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    for round, client_id, down, up in ENTRIES:
        ledger.record(round, client_id, bytes_down=down, bytes_up=up)
    return ledger


def test_totals_are_the_sums_of_the_entries(ledger):
    assert ledger.bytes_down == sum(down for _, _, down, _ in ENTRIES)
    assert ledger.bytes_up == sum(up for _, _, _, up in ENTRIES)


def test_rounds_are_summed_in_order(ledger):
    assert ledger.rounds() == [
        {
            "round": round,
            "num_clients": len({client_id for r, client_id, _, _ in ENTRIES if r == round}),
            "bytes_down": sum(down for r, _, down, _ in ENTRIES if r == round),
            "bytes_up": sum(up for r, _, _, up in ENTRIES if r == round),
        }
        for round in (0, 1, 10)
    ]


def test_clients_are_summed_in_order(ledger):
    assert list(ledger.clients().items()) == [
        (
            name,
            {
                "bytes_down": sum(down for _, client_id, down, _ in ENTRIES if client_id == name),
                "bytes_up": sum(up for _, client_id, _, up in ENTRIES if client_id == name),
                "num_rounds": len({round for round, client_id, _, _ in ENTRIES if client_id == name}),
            },
        )
        for name in ("a", "b")
    ]


def test_empty_ledger_has_zero_bytes():
    ledger = Ledger()
    assert (ledger.bytes_down, ledger.bytes_up, ledger.rounds(), ledger.clients()) == (0, 0, [], {})


def test_ledger_survives_json_and_a_file(ledger, tmp_path):
    ledger.save(tmp_path)
    values = json.loads((tmp_path / LEDGER_NAME).read_text(encoding="utf-8"))
    for copy in (Ledger.load(tmp_path), Ledger.from_dict(values), Ledger.from_dict(ledger.to_dict())):
        assert copy.to_dict() == ledger.to_dict()
        assert copy.rounds() == ledger.rounds()


def test_copy_does_not_change_the_original(ledger):
    before = ledger.bytes_up
    copy = Ledger.from_dict(ledger.to_dict())
    copy.record(0, "a", bytes_up=5)
    assert (ledger.bytes_up, copy.bytes_up) == (before, before + 5)
