"""The documentation lists each field that crosses the wire in a round with secure aggregation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from wire_recording import DOWN, HIDDEN, SUM, UP, Recorded, page_table, record, table

from hf_federated import Ledger
from hf_federated.messages import Announcement


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Recorded], Ledger]:
    return record(tmp_path_factory.mktemp("run"))


def without_sizes(text: str) -> list[str]:
    return re.sub(r"\| \d+ \|", "|", text).splitlines()


def of_client(messages: Sequence[Recorded], client_id: str) -> list[Recorded]:
    return [message for message in messages if message.client_id == client_id]


def test_page_lists_the_messages_and_fields_of_a_round(recorded) -> None:
    """If this test fails, run `python tests/secure_aggregation/wire_recording.py`, and review the new fields."""
    assert without_sizes(page_table()) == without_sizes(table(recorded[0]))


def test_clients_exchange_the_same_kinds_and_fields(recorded) -> None:
    first, *others = {
        tuple((message.direction, message.kind, *message.fields) for message in of_client(recorded[0], client_id))
        for client_id in {message.client_id for message in recorded[0]}
    }
    assert not others
    assert [kind for direction, kind, *_ in first if direction == UP and kind != Announcement.kind] == [
        "advertised_keys",
        "key_shares",
        "masked_update",
        "survivors_signature",
        "unmask_shares",
    ]


def test_recording_has_all_bytes_of_the_ledger(recorded) -> None:
    messages, ledger = recorded
    for direction, expected in ((DOWN, ledger.bytes_down), (UP, ledger.bytes_up)):
        in_rounds = [message for message in messages if message.kind != Announcement.kind]
        assert sum(message.num_bytes for message in in_rounds if message.direction == direction) == expected > 0


def chi_squared(content: bytes) -> float:
    """Distance of the bytes from uniform bytes, which have the mean 255 and the standard deviation 22.6."""
    expected, counts = len(content) / 256, Counter(content)
    return sum((counts[byte] - expected) ** 2 / expected for byte in range(256))


def test_masked_update_has_uniform_bytes_and_the_model_has_not(recorded) -> None:
    (kind, field), *_ = (name for name, reader in HIDDEN.items() if reader == SUM)
    masked = [message.fields[field] for message in recorded[0] if message.kind == kind]
    assert len(set(masked)) == 3
    assert all(chi_squared(content) < 400 for content in masked)
    sent = next(message.fields["state"] for message in recorded[0] if message.kind == "secure_fit")
    assert chi_squared(sent) > 1000
