"""New keys after so many steps: when, from what, and what becomes of messages under the old ones."""

from __future__ import annotations

import hmac

import pytest
from sessions import connected, flipped, shake_hands

from hf_federated.messages.serialization import unpack
from hf_federated.security import sealing
from hf_federated.security.encryption import (
    EncryptionError,
    HandshakeError,
    MessageError,
    RotationDueError,
)
from hf_federated.security.handshake import ClientExchange, Parties, Place, ServerExchange, _derive


def test_keys_rotate_after_exactly_rotate_every_steps(parties):
    client, server = connected(parties, rotate_every=3)
    for _ in range(2):
        for step in range(3):
            assert not client.rotation_due
            for kind in ("forward", "backward"):
                server.open(client.seal(b"states", kind), kind)
                client.open(server.seal(b"outputs", kind), kind)
            assert server.steps == step
            client.end_step()
        assert client.rotation_due
        with pytest.raises(RotationDueError, match="good for 3 steps .*hello"):
            client.seal(b"states")
        with pytest.raises(RotationDueError, match="good for 3 steps"):
            client.end_step()
        shake_hands(client, server)
    assert client.epoch == server.epoch == 2
    assert client.steps == server.steps == 0


def test_the_server_refuses_a_client_that_does_not_rotate(parties):
    client, server = connected(parties, rotate_every=2)
    client._steps = 2
    sealed = client._directions[0].seal(b"states", 2, b"\1data")
    with pytest.raises(RotationDueError, match="epoch 0 are good for 2 steps .* 'north' has to rotate"):
        server.open(sealed)


def test_the_server_refuses_steps_that_go_back(parties):
    client, server = connected(parties, rotate_every=5)
    client.end_step()
    server.open(client.seal(b"states"))
    with pytest.raises(MessageError, match="counts 0 steps after 1"):
        server.open(client._directions[0].seal(b"states", 0, b"\1data"))


def test_without_rotate_every_keys_stay(parties):
    client, server = connected(parties, rotate_every=None)
    for _ in range(1000):
        client.end_step()
    assert not client.rotation_due and client.steps == 0
    assert server.open(client.seal(b"states")) == b"states"


def test_rotation_makes_all_keys_anew_and_keeps_the_session(parties):
    client, server = connected(parties)
    before = client._keys
    hello = ClientExchange(client._parties, Place.after(before), 2048).hello
    first_key = unpack(bytes.fromhex(unpack(hello)["body"]))["encryption_key"]
    shake_hands(client, server)
    after = client._keys
    assert after == server._keys and after.session_id == before.session_id
    secrets = [before.client_to_server, before.server_to_client, before.chain]
    secrets += [after.client_to_server, after.server_to_client, after.chain]
    assert len(set(secrets)) == 6
    again = ClientExchange(client._parties, Place.after(before), 2048).hello
    assert unpack(bytes.fromhex(unpack(again)["body"]))["encryption_key"] != first_key


def test_messages_of_the_old_epoch_are_refused(parties):
    client, server = connected(parties)
    opened, in_flight = client.seal(b"opened"), server.seal(b"in flight")
    server.open(opened)
    client.open(in_flight)
    shake_hands(client, server)
    for receiver, sealed in ((server, opened), (client, in_flight)):
        with pytest.raises(MessageError, match="is of key epoch 0; the session is in epoch 1"):
            receiver.open(sealed)


def test_nothing_is_sealed_while_keys_rotate(parties):
    client, server = connected(parties)
    reply = server.reply(client.hello())
    for session in (client, server):
        with pytest.raises(EncryptionError, match="being rotated"):
            session.seal(b"states")
    server.complete(client.finish(reply))
    assert server.open(client.seal(b"states")) == b"states"


def test_a_rotation_is_sealed_with_the_epoch_it_ends(parties):
    client, server = connected(parties)
    hello = client.hello()
    with pytest.raises(MessageError, match="not authentic.*rotation 'hello'"):
        server.reply(flipped(hello, 8 * len(hello) // 2))
    # An unsealed hello, however well signed, does not rotate.
    plain = ClientExchange(client._parties, Place.after(client._keys), 2048).hello
    with pytest.raises(MessageError):
        server.reply(plain)
    # Nor is one opened as a payload, or a payload taken for one.
    with pytest.raises(MessageError, match="not authentic"):
        server.open(hello, "hello")
    reply = server.reply(hello)
    with pytest.raises(MessageError, match="not authentic"):
        client.finish(flipped(reply, 300))
    server.complete(client.finish(reply))
    with pytest.raises(MessageError, match="not authentic.*rotation 'hello'"):
        server.reply(client.seal(plain, "hello"))


def test_a_thief_of_session_keys_cannot_rotate_without_the_signing_key(parties):
    client, server = connected(parties)
    thief = Parties(parties["south"], "center", parties["center"].fingerprint, None)
    forged = ClientExchange(thief, Place.after(client._keys), 2048).hello
    with pytest.raises(HandshakeError, match="pinned for 'north'"):
        server.reply(client._seal_rotation(forged, b"hello"))


def test_keys_follow_from_those_before(parties):
    """The same handshake after other keys gives other keys."""
    north, center = parties["north"], parties["center"]
    client, server = connected(parties)
    place = Place.after(client._keys)
    asks = ClientExchange(Parties(north, "center", center.fingerprint, None), place, 2048)
    answers = ServerExchange(Parties(center, "north", north.fingerprint, None), place, 2048, asks.hello)
    finish, keys = asks.finish(answers.reply)
    assert answers.complete(finish) == keys
    other = Place(place.session_id, place.epoch, bytes(32))
    object.__setattr__(answers, "_place", other)
    assert answers.complete(finish).client_to_server != keys.client_to_server


@pytest.mark.parametrize("chain", [None, bytes(range(32))])
def test_keys_are_hkdf_of_both_secrets_over_the_transcript(chain):
    def digest(key: bytes, message: bytes) -> bytes:
        return hmac.new(key, message, "sha256").digest()

    transcript, info = bytes(range(100, 132)), b"hf-federated split keys 1" + bytes(range(100, 132))
    place = Place(b"session", 7, chain) if chain else Place()
    keys = _derive(place, b"c" * 32, b"s" * 32, transcript)
    # RFC 5869: extract with the salt, which is zeros if there is none, then expand to three blocks.
    extracted = digest(chain or bytes(32), b"c" * 32 + b"s" * 32)
    first = digest(extracted, info + b"\1")
    second = digest(extracted, first + info + b"\2")
    third = digest(extracted, second + info + b"\3")
    assert (keys.client_to_server, keys.server_to_client, keys.chain) == (first, second, third)
    assert (keys.session_id, keys.epoch) == ((b"session", 7) if chain else (transcript, 0))


def test_a_key_that_carried_what_it_may_seals_nothing_more(parties, monkeypatch):
    client, server = connected(parties)
    monkeypatch.setattr(sealing, "MAX_BLOCKS", 10)
    for _ in range(2):
        assert not client.rotation_due
        server.open(client.seal(bytes(33)))  # three blocks and the tag
    assert client.rotation_due and server.rotation_due
    with pytest.raises(RotationDueError, match="carried 2 messages and 8 blocks, and may carry .* and 10"):
        client.seal(bytes(17))  # would be eleven
    server.open(client.seal(bytes(16)))  # fits exactly
    monkeypatch.setattr(sealing, "MAX_BLOCKS", 2**36)
    client._directions[0].number = server._directions[1].number = sealing.MAX_MESSAGES - 1
    server.open(client.seal(b""))
    with pytest.raises(RotationDueError, match=f"carried {2**32 - 16} messages"):
        client.seal(b"")
    # The rotation itself still fits.
    shake_hands(client, server)
    assert server.open(client.seal(b"states")) == b"states" and not client.rotation_due


def test_a_payload_beyond_what_one_call_encrypts_is_refused(lasting, monkeypatch):
    monkeypatch.setattr(sealing, "MAX_PAYLOAD_BYTES", 10)
    with pytest.raises(EncryptionError, match="has 11 bytes; a message has at most 10. Send it in parts"):
        lasting[0].seal(bytes(11))
