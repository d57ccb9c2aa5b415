"""Identities and encrypted sessions that tests share, because RSA keys take time to generate."""

from __future__ import annotations

import pytest
from sessions import connected_sessions

from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession


@pytest.fixture(scope="session")
def parties() -> dict[str, Identity]:
    return {name: Identity.generate(name, 2048) for name in ("north", "south", "center")}


@pytest.fixture(scope="module")
def shared_sessions(parties) -> tuple[ClientSession, ServerSession]:
    """A connected client and server session, for tests in which the server opens every message."""
    return connected_sessions(parties)
