"""`ReadGate` limits how many large messages are in memory."""

from __future__ import annotations

import threading
import time

import pytest

from hf_federated.transport.errors import RequestRejectedError
from hf_federated.transport.read_gate import ReadGate


def enter_in_thread(gate: ReadGate, client_id: str, num_bytes: int = 10) -> tuple[threading.Thread, list[str]]:
    outcome: list[str] = []

    def enter() -> None:
        try:
            gate.enter(client_id, num_bytes)
            outcome.append("inside")
        except RequestRejectedError:
            outcome.append("refused")

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    return thread, outcome


def test_second_large_message_waits_until_the_first_has_left():
    gate = ReadGate(min_bytes=10)
    gate.enter("north", 10)
    thread, outcome = enter_in_thread(gate, "south")
    time.sleep(0.05)
    assert outcome == []
    gate.leave("north")
    thread.join(5)
    assert outcome == ["inside"]


def test_small_messages_and_repetitions_do_not_wait():
    gate = ReadGate(min_bytes=10)
    gate.enter("north", 10)
    gate.enter("south", 9)
    gate.enter("north", 10)
    gate.leave("west")
    thread, outcome = enter_in_thread(gate, "south")
    time.sleep(0.05)
    assert outcome == []
    gate.leave("north")
    thread.join(5)


def test_closed_gate_refuses_waiting_and_later_messages():
    gate = ReadGate(min_bytes=10)
    gate.enter("north", 10)
    thread, outcome = enter_in_thread(gate, "south")
    time.sleep(0.05)
    gate.close()
    thread.join(5)
    assert outcome == ["refused"]
    with pytest.raises(RequestRejectedError):
        gate.enter("west", 10)


def test_slow_message_does_not_block_the_other_clients():
    gate = ReadGate(min_bytes=10, patience=0.2)
    gate.enter("slow", 10)
    started = time.monotonic()
    for name in ("north", "south"):
        gate.enter(name, 10)
        gate.leave(name)
    assert 0.1 < time.monotonic() - started < 2
