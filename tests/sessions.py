"""Encrypted sessions between a client and the server of a split model, for tests."""

from __future__ import annotations

from hf_federated.security.encrypted_session import ClientSession, ServerSession


MIB = 1 << 20


def new_sessions(parties, client="north", rotate_every=None) -> tuple[ClientSession, ServerSession]:
    """A client session and a server session before the handshake."""
    identity, center = parties[client], parties["center"]
    settings = {"rotate_every": rotate_every, "rsa_bits": 2048}
    return (
        ClientSession(identity, "center", center.fingerprint, **settings),
        ServerSession(center, client, identity.fingerprint, **settings),
    )


def perform_handshake(client: ClientSession, server: ServerSession) -> None:
    server.complete(client.finish(server.reply(client.hello())))


def connected_sessions(parties, client="north", rotate_every=None) -> tuple[ClientSession, ServerSession]:
    """A client session and a server session after the handshake."""
    sessions = new_sessions(parties, client, rotate_every)
    perform_handshake(*sessions)
    return sessions


def flip_bit(message: bytes, bit: int) -> bytes:
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
