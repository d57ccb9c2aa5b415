"""Ledger: sums by client and by round, and serialization to a file."""

from __future__ import annotations

import json
import zlib

import pytest
import torch

from hf_federated import Ledger
from hf_federated.messages.ledger import LEDGER_NAME
from hf_federated.messages.serialization import pack, unpack


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


def test_ledger_survives_a_checkpoint(ledger):
    state = unpack(pack(ledger.state_dict()))
    copy = Ledger.from_state_dict(state)
    assert copy.to_dict() == ledger.to_dict()
    assert (copy.bytes_down, copy.bytes_up) == (ledger.bytes_down, ledger.bytes_up)
    assert pack(copy.state_dict()) == pack(ledger.state_dict())


def test_state_depends_on_the_accounts_and_not_on_their_order():
    """Replies arrive in another order on another engine, and a resumed run adds the earlier rounds at once."""
    entries = [(round, f"client {client}", 100 + client, round) for round in range(600) for client in (round % 7, 3)]
    states = []
    for order in (entries, entries[::-1], sorted(entries, key=lambda entry: entry[2])):
        ledger = Ledger()
        for number, (round, client_id, down, up) in enumerate(order):
            ledger.record(round, client_id, down, up)
            if number % 100 == 0:
                ledger.state_dict()
        states.append(pack(ledger.state_dict()))
    assert states[0] == states[1] == states[2]
    assert Ledger.from_state_dict(unpack(states[0])).to_dict() == ledger.to_dict()


def test_changed_account_of_an_earlier_round_is_saved(ledger):
    ledger.state_dict()
    ledger.set_account(0, "b", 1, 2)
    ledger.record(2, "a new client", 5)
    assert ledger.account(0, "b") == (1, 2)
    assert ledger.bytes_up == sum(row["bytes_up"] for row in ledger.rounds())
    assert Ledger.from_state_dict(ledger.state_dict()).to_dict() == ledger.to_dict()


def test_checkpoint_of_version_0_1_0_has_the_accounts_as_a_dictionary(ledger):
    assert Ledger.from_state_dict(ledger.to_dict()).to_dict() == ledger.to_dict()


def test_state_of_many_equal_rounds_is_small():
    ledger = Ledger()
    for round in range(1000):
        for client in range(20):
            ledger.record(round, f"client {client}", 1_000_000, 1_000_100)
    assert len(pack(ledger.state_dict())) < 20_000
    assert len(pack(ledger.to_dict())) > 500_000


def test_damaged_state_is_refused(ledger):
    state = ledger.state_dict()
    bomb = torch.frombuffer(bytearray(zlib.compress(bytes(10**6))), dtype=torch.uint8)
    for changes in (
        {"blocks": state["blocks"][:-1]},
        {"blocks": state["blocks"].flip(0)},
        {"blocks": bomb, "layout": torch.tensor([[len(bomb), 1, 1]])},
        {"layout": state["layout"] + 1},
        {"layout": -state["layout"]},
        {"clients": ["a"]},
        {"clients": ["a", "a"]},
        {"clients": None},
    ):
        with pytest.raises(ValueError, match="accounts of a ledger are damaged"):
            Ledger.from_state_dict({**state, **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Expecting value"),
        ("[]", "must be a dictionary with the key 'rounds'"),
        ('{"rounds": {"x": {}}}', "the round 'x'"),
        ('{"rounds": {"0": []}}', r"Round 0 of a ledger is \[\]"),
        ('{"rounds": {"0": {"a": [1]}}}', r"client 'a' in round 0 of a ledger is \[1\]"),
        ('{"rounds": {"0": {"a": [1, -1]}}}', "two integers of at least 0"),
        ('{"rounds": {"0": {"a": [1, true]}}}', "two integers of at least 0"),
        ('{"rounds": {"0": {"a": [1, NaN]}}}', "two integers of at least 0"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_damaged_file_is_refused_by_its_name(text, words, tmp_path):
    (tmp_path / LEDGER_NAME).write_text(text)
    with pytest.raises(ValueError, match=rf"federated_ledger\.json' is not the ledger of a run: .*{words}"):
        Ledger.load(tmp_path)


def test_copy_does_not_change_the_original(ledger):
    before = ledger.bytes_up
    copy = Ledger.from_dict(ledger.to_dict())
    copy.record(0, "a", bytes_up=5)
    assert (ledger.bytes_up, copy.bytes_up) == (before, before + 5)
