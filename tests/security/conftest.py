"""Identities and encrypted sessions that tests share, because RSA keys take time to generate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import connected_sessions

from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession
from hf_federated.security.handshake import ClientHandshake, EpochKeys, ServerHandshake
from hf_federated.security.keys import generate_rsa_key


@pytest.fixture(scope="session")
def private_keys():
    return {name: generate_rsa_key(2048) for name in ("north", "south", "center")}


@pytest.fixture(scope="session")
def parties(private_keys) -> dict[str, Identity]:
    return {name: Identity(name, key) for name, key in private_keys.items()}


@pytest.fixture
def epoch_keys(monkeypatch) -> dict[str, list[EpochKeys]]:
    """The keys that the client and the server derive in the handshakes of a test, in order."""
    derived: dict[str, list[EpochKeys]] = {"client": [], "server": []}
    finish, complete = ClientHandshake.finish, ServerHandshake.complete

    def finish_and_record(handshake: ClientHandshake, reply: bytes) -> tuple[bytes, EpochKeys]:
        message, keys = finish(handshake, reply)
        derived["client"].append(keys)
        return message, keys

    def complete_and_record(handshake: ServerHandshake, message: bytes) -> EpochKeys:
        derived["server"].append(complete(handshake, message))
        return derived["server"][-1]

    monkeypatch.setattr(ClientHandshake, "finish", finish_and_record)
    monkeypatch.setattr(ServerHandshake, "complete", complete_and_record)
    return derived


@pytest.fixture(scope="module")
def shared_sessions(parties) -> tuple[ClientSession, ServerSession]:
    """A connected client and server session, for tests in which the server opens every message."""
    return connected_sessions(parties)


@pytest.fixture
def peak_memory() -> Callable[[Callable[[], object]], int]:
    """Measure by how many bytes the memory of the process grows at most while a function runs."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        pytest.skip("the peak of the memory is read from Linux")

    def status(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    def measure(function: Callable[[], object]) -> int:
        before = status("VmRSS")
        reset.write_text("5")  # resets the peak
        result = function()
        peak = status("VmHWM")
        del result
        return peak - before

    return measure
