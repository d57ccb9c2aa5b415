"""Sessions of a client and the server of a split model that met, for tests of what is sealed between them."""

from __future__ import annotations

from hf_federated.security.encryption import ClientSession, ServerSession


MIB = 1 << 20


def ends(parties, client="north", rotate_every=None) -> tuple[ClientSession, ServerSession]:
    """A client and its server that have not met."""
    own, center = parties[client], parties["center"]
    settings = {"rotate_every": rotate_every, "rsa_bits": 2048}
    return (
        ClientSession(own, "center", center.fingerprint, **settings),
        ServerSession(center, client, own.fingerprint, **settings),
    )


def shake_hands(client: ClientSession, server: ServerSession) -> None:
    server.complete(client.finish(server.reply(client.hello())))


def connected(parties, client="north", rotate_every=None) -> tuple[ClientSession, ServerSession]:
    both = ends(parties, client, rotate_every)
    shake_hands(*both)
    return both


def flipped(message: bytes, bit: int) -> bytes:
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
