"""Parties of sealed sessions; their keys take time to make."""

from __future__ import annotations

import pytest
from sessions import connected

from hf_federated.security.encryption import ClientSession, Identity, ServerSession


@pytest.fixture(scope="session")
def parties() -> dict[str, Identity]:
    return {name: Identity.generate(name, 2048) for name in ("north", "south", "center")}


@pytest.fixture(scope="module")
def lasting(parties) -> tuple[ClientSession, ServerSession]:
    """A connected pair for tests that leave both ends in step."""
    return connected(parties)
