"""Key rotation: when it is due, how the new keys are derived, and how messages of the old epoch are handled."""

from __future__ import annotations

import hmac

import pytest
from sessions import connected_sessions, flip_bit, perform_handshake

from hf_federated.messages.serialization import unpack
from hf_federated.security import authenticated_encryption
from hf_federated.security.authenticated_encryption import DirectionCipher
from hf_federated.security.encrypted_session import (
    EncryptionError,
    HandshakeError,
    MessageError,
    RotationDueError,
)
from hf_federated.security.handshake import ClientHandshake, HandshakeContext, Parties, ServerHandshake, derive_keys


def test_rotation_is_due_after_exactly_rotate_every_steps(parties):
    client, server = connected_sessions(parties, rotate_every=3)
    for _ in range(2):
        for step in range(3):
            assert not client.rotation_due
            for kind in ("forward", "backward"):
                server.open(client.seal(b"states", kind), kind)
                client.open(server.seal(b"outputs", kind), kind)
            assert server.steps == step
            client.end_step()
        assert client.rotation_due
        with pytest.raises(RotationDueError, match="valid for 3 steps .*hello"):
            client.seal(b"states")
        with pytest.raises(RotationDueError, match="valid for 3 steps"):
            client.end_step()
        perform_handshake(client, server)
    assert client.epoch == server.epoch == 2
    assert client.steps == server.steps == 0


def test_server_rejects_messages_of_client_that_does_not_rotate(parties, epoch_keys):
    _, server = connected_sessions(parties, rotate_every=2)
    sealed = DirectionCipher(epoch_keys["client"][0], False, "north").seal(b"states", 2, b"\1data")
    with pytest.raises(RotationDueError, match="epoch 0 are valid for 2 steps .* 'north' must rotate"):
        server.open(sealed)


def test_server_rejects_decreasing_number_of_steps(parties, epoch_keys):
    _, server = connected_sessions(parties, rotate_every=5)
    cipher = DirectionCipher(epoch_keys["client"][0], False, "north")
    server.open(cipher.seal(b"states", 1, b"\1data"))
    with pytest.raises(MessageError, match="reports 0 steps, but an earlier message reported 1 steps"):
        server.open(cipher.seal(b"states", 0, b"\1data"))


def test_rotate_every_none_keeps_keys(parties):
    client, server = connected_sessions(parties, rotate_every=None)
    for _ in range(1000):
        client.end_step()
    assert not client.rotation_due and client.steps == 0
    assert server.open(client.seal(b"states")) == b"states"


def of_north(parties) -> Parties:
    return Parties(parties["north"], "center", parties["center"].fingerprint, None)


def test_rotation_replaces_all_keys_and_keeps_session_id(parties, epoch_keys):
    client, server = connected_sessions(parties)
    perform_handshake(client, server)
    before, after = epoch_keys["client"]
    assert epoch_keys["server"] == [before, after] and after.session_id == before.session_id
    secrets = [before.client_to_server, before.server_to_client, before.chaining_key]
    secrets += [after.client_to_server, after.server_to_client, after.chaining_key]
    assert len(set(secrets)) == 6
    hellos = [ClientHandshake(of_north(parties), HandshakeContext.after(before), 2048).hello for _ in range(2)]
    keys = {unpack(bytes.fromhex(unpack(hello)["body"]))["encryption_key"] for hello in hellos}
    assert len(keys) == 2


def test_messages_of_previous_epoch_are_rejected(parties):
    client, server = connected_sessions(parties)
    opened, in_flight = client.seal(b"opened"), server.seal(b"in flight")
    server.open(opened)
    client.open(in_flight)
    perform_handshake(client, server)
    for receiver, sealed in ((server, opened), (client, in_flight)):
        with pytest.raises(MessageError, match="belongs to key epoch 0, but the session is in epoch 1"):
            receiver.open(sealed)


def test_no_payload_is_encrypted_during_rotation(parties):
    client, server = connected_sessions(parties)
    reply = server.reply(client.hello())
    for session in (client, server):
        with pytest.raises(EncryptionError, match="being rotated"):
            session.seal(b"states")
    server.complete(client.finish(reply))
    assert server.open(client.seal(b"states")) == b"states"


def test_rotation_messages_are_encrypted_with_keys_of_current_epoch(parties, epoch_keys):
    client, server = connected_sessions(parties)
    hello = client.hello()
    with pytest.raises(MessageError, match="not authentic.*rotation 'hello'"):
        server.reply(flip_bit(hello, 8 * len(hello) // 2))
    # A correctly signed hello that is not encrypted is rejected.
    plain = ClientHandshake(of_north(parties), HandshakeContext.after(epoch_keys["client"][0]), 2048).hello
    with pytest.raises(MessageError):
        server.reply(plain)
    # The kinds separate payloads from rotation messages.
    with pytest.raises(MessageError, match="not authentic"):
        server.open(hello, "hello")
    reply = server.reply(hello)
    with pytest.raises(MessageError, match="not authentic"):
        client.finish(flip_bit(reply, 300))
    server.complete(client.finish(reply))
    with pytest.raises(MessageError, match="not authentic.*rotation 'hello'"):
        server.reply(client.seal(plain, "hello"))


def test_rotation_requires_signing_key(parties, epoch_keys):
    _, server = connected_sessions(parties)
    attacker, keys = Parties(parties["south"], "center", parties["center"].fingerprint, None), epoch_keys["client"][0]
    forged = ClientHandshake(attacker, HandshakeContext.after(keys), 2048).hello
    with pytest.raises(HandshakeError, match="pinned for 'north'"):
        server.reply(DirectionCipher(keys, False, "north").seal(forged, 0, b"\0hello"))


def test_keys_depend_on_previous_chaining_key(parties):
    """Completing the same handshake with another chaining key results in other keys."""
    north, center = parties["north"], parties["center"]
    context = HandshakeContext(bytes(range(32)), 1, bytes(range(100, 132)))
    client_side = ClientHandshake(of_north(parties), context, 2048)
    server_side = ServerHandshake(Parties(center, "north", north.fingerprint, None), context, 2048, client_side.hello)
    finish, keys = client_side.finish(server_side.reply)
    assert server_side.complete(finish) == keys
    other = HandshakeContext(context.session_id, context.epoch, bytes(32))
    server_side.context = other
    assert server_side.complete(finish).client_to_server != keys.client_to_server


@pytest.mark.parametrize("chaining_key", [None, bytes(range(32))])
def test_keys_are_hkdf_of_secrets_and_transcript(chaining_key):
    def digest(key: bytes, message: bytes) -> bytes:
        return hmac.new(key, message, "sha256").digest()

    transcript, info = bytes(range(100, 132)), b"hf-federated split keys 1" + bytes(range(100, 132))
    context = HandshakeContext(b"session", 7, chaining_key) if chaining_key else HandshakeContext()
    keys = derive_keys(context, b"c" * 32, b"s" * 32, transcript)
    # RFC 5869: extract with the salt (zeros without a salt), then expand to three blocks.
    extracted = digest(chaining_key or bytes(32), b"c" * 32 + b"s" * 32)
    first = digest(extracted, info + b"\1")
    second = digest(extracted, first + info + b"\2")
    third = digest(extracted, second + info + b"\3")
    assert (keys.client_to_server, keys.server_to_client, keys.chaining_key) == (first, second, third)
    assert (keys.session_id, keys.epoch) == ((b"session", 7) if chaining_key else (transcript, 0))


def test_key_limits_require_rotation(parties, monkeypatch):
    client, server = connected_sessions(parties)
    monkeypatch.setattr(authenticated_encryption, "MAX_BLOCKS", 10)
    for _ in range(2):
        assert not client.rotation_due
        server.open(client.seal(bytes(33)))  # three blocks and the tag
    assert client.rotation_due and server.rotation_due
    with pytest.raises(RotationDueError, match="encrypted 2 messages and 8 blocks. Its limits are .* and 10"):
        client.seal(bytes(17))  # 11 blocks
    server.open(client.seal(bytes(16)))  # exactly 10 blocks
    monkeypatch.setattr(authenticated_encryption, "MAX_BLOCKS", 2**36)
    monkeypatch.setattr(authenticated_encryption, "MAX_MESSAGES", 4)
    server.open(client.seal(b""))
    with pytest.raises(RotationDueError, match="encrypted 4 messages"):
        client.seal(b"")
    # Message numbers are reserved for the rotation.
    perform_handshake(client, server)
    assert server.open(client.seal(b"states")) == b"states" and not client.rotation_due


def test_a_key_encrypts_almost_as_many_messages_as_message_numbers(parties, epoch_keys):
    connected_sessions(parties)
    cipher = DirectionCipher(epoch_keys["client"][0], False, "north")
    cipher.num_messages = authenticated_encryption.MAX_MESSAGES - 1
    cipher.check_capacity(0)
    cipher.seal(b"", 0, b"\1data")
    with pytest.raises(RotationDueError, match=f"encrypted {2**32 - 16} messages"):
        cipher.check_capacity(0)


def test_too_large_payload_is_rejected(shared_sessions, monkeypatch):
    monkeypatch.setattr(authenticated_encryption, "MAX_PAYLOAD_BYTES", 10)
    with pytest.raises(EncryptionError, match="has 11 bytes, but a message holds at most 10 bytes. Send the"):
        shared_sessions[0].seal(bytes(11))
