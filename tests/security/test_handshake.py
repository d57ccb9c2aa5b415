"""The handshake between a client and the server of a split model: authentication, changed messages, replay."""

from __future__ import annotations

import random

import pytest
from sessions import flip_bit, new_sessions

from hf_federated.messages.serialization import pack, unpack
from hf_federated.security.encrypted_session import (
    ClientSession,
    EncryptionError,
    HandshakeError,
    Identity,
    ServerSession,
)


def test_wrong_fingerprint_is_rejected_and_error_names_party(parties):
    north, south, center = parties["north"], parties["south"], parties["center"]
    client = ClientSession(north, "center", south.fingerprint, rsa_bits=2048)
    server = ServerSession(center, "north", north.fingerprint, rsa_bits=2048)
    with pytest.raises(HandshakeError, match="receiver_fingerprint = .*'center' expects"):
        server.reply(client.hello())
    server = ServerSession(center, "north", south.fingerprint, rsa_bits=2048)
    client = ClientSession(north, "center", center.fingerprint, rsa_bits=2048)
    with pytest.raises(
        HandshakeError, match=f"key {north.fingerprint}, but {south.fingerprint} is pinned for 'north'"
    ):
        server.reply(client.hello())


def test_relay_cannot_impersonate_server(parties):
    north, center = parties["north"], parties["center"]
    impostor = Identity.generate("center", 2048)
    client = ClientSession(north, "center", center.fingerprint, rsa_bits=2048)
    relay = ServerSession(impostor, "north", north.fingerprint, rsa_bits=2048)
    hello = client.hello()
    with pytest.raises(HandshakeError, match="receiver_fingerprint"):
        relay.reply(hello)
    # The relay replaces its fingerprint in the hello to produce a reply.
    fields = unpack(bytes.fromhex(unpack(hello)["body"])) | {"receiver_fingerprint": impostor.fingerprint}
    body = pack(fields)
    patched = pack({"public_key": north.public_key.hex(), "body": body.hex(), "signature": north.sign(body).hex()})
    with pytest.raises(HandshakeError, match=f"key {impostor.fingerprint}.*pinned for 'center'.*impersonates it"):
        client.finish(relay.reply(patched))


def test_client_cannot_impersonate_another_client(parties, private_keys):
    center = parties["center"]
    impostor = Identity("north", private_keys["south"])
    client = ClientSession(impostor, "center", center.fingerprint, rsa_bits=2048)
    _, server = new_sessions(parties, "north")
    with pytest.raises(HandshakeError, match="pinned for 'north'"):
        server.reply(client.hello())


@pytest.mark.parametrize("which", ["hello", "reply", "finish"])
def test_changed_handshake_message_is_rejected_and_original_still_works(parties, which):
    client, server = new_sessions(parties)
    hello = client.hello()
    reply = server.reply(hello)
    messages = {"hello": (hello, server.reply), "reply": (reply, client.finish)}
    if which == "finish":
        messages["finish"] = (client.finish(reply), server.complete)
    message, receive = messages[which]
    bits = [*range(128), *random.Random(0).sample(range(len(message) * 8), 150), len(message) * 8 - 1]
    for bit in bits:
        with pytest.raises(HandshakeError, match=f"{which} of '(north|center)'"):
            receive(flip_bit(message, bit))
    for changed in (b"", message[:-1], message + b" ", message[:100], bytes(1 << 17), b"\x80" * 64):
        with pytest.raises(HandshakeError):
            receive(changed)
    if which == "hello":
        server.complete(client.finish(server.reply(hello)))
    elif which == "reply":
        server.complete(client.finish(reply))
    else:
        server.complete(message)
    assert server.open(client.seal(b"states")) == b"states"


def test_unsigned_part_of_message_has_only_one_valid_encoding(parties):
    client, server = new_sessions(parties)
    outer = unpack(client.hello())
    for changed in (
        outer | {"more": ""},
        {name: outer[name] for name in ("body", "public_key", "signature")},
        outer | {"body": outer["body"].upper()},
        {name: outer[name] for name in ("body", "signature")},
        list(outer.values()),
        outer | {"signature": 3},
    ):
        with pytest.raises(HandshakeError, match="hello of 'north'"):
            server.reply(pack(changed))


@pytest.mark.parametrize("key", ["encryption_key", "wrapped_secret"])
def test_reply_to_another_hello_is_rejected(parties, key):
    """A reply is valid for one hello only, and fields of two signed replies cannot be combined."""
    client, server = new_sessions(parties)
    other_client, _ = new_sessions(parties)
    reply = server.reply(client.hello())
    foreign = server.reply(other_client.hello())
    with pytest.raises(HandshakeError, match="reply of 'center' has transcript"):
        client.finish(foreign)
    body = pack(
        unpack(bytes.fromhex(unpack(reply)["body"])) | {key: unpack(bytes.fromhex(unpack(foreign)["body"]))[key]}
    )
    with pytest.raises(HandshakeError, match="signature"):
        client.finish(pack(unpack(reply) | {"body": body.hex()}))


def test_recorded_handshake_cannot_be_replayed(parties):
    client, server = new_sessions(parties)
    hello = client.hello()
    finish = client.finish(server.reply(hello))
    server.complete(finish)
    again = ServerSession(parties["center"], "north", parties["north"].fingerprint, rotate_every=None, rsa_bits=2048)
    again.reply(hello)  # the server replies, but the recorded finish is not valid for this reply
    with pytest.raises(HandshakeError, match="finish of 'north' has transcript"):
        again.complete(finish)
    assert again.epoch is None
    with pytest.raises(EncryptionError, match="session with 'north' has no keys yet"):
        again.open(client.seal(b"states"))


def test_handshake_message_of_wrong_kind_is_rejected(parties):
    client, server = new_sessions(parties)
    hello = client.hello()
    reply = server.reply(hello)
    with pytest.raises(HandshakeError, match="pinned for 'center'"):
        client.finish(hello)
    with pytest.raises(HandshakeError, match="other fields|has message"):
        server.complete(hello)
    with pytest.raises(HandshakeError, match="pinned for 'north'"):
        server.reply(reply)


def test_different_rotate_every_is_rejected(parties):
    client, _ = new_sessions(parties, rotate_every=50)
    _, server = new_sessions(parties, rotate_every=100)
    with pytest.raises(HandshakeError, match="rotate_every = 50, but 'center' expects 100. Give both parties"):
        server.reply(client.hello())


def test_field_types_of_signed_message_are_checked(parties):
    """A known client with modified software can sign any fields."""
    north, (client, server) = parties["north"], new_sessions(parties, rotate_every=1)
    fields = unpack(bytes.fromhex(unpack(client.hello())["body"]))
    for changed in ({"rotate_every": True}, {"epoch": False}, {"encryption_key": 3}, {"encryption_key": "zz"}):
        body = pack(fields | changed)
        signed = pack({"public_key": north.public_key.hex(), "body": body.hex(), "signature": north.sign(body).hex()})
        with pytest.raises(HandshakeError, match="hello of 'north'"):
            server.reply(signed)


def test_weak_or_unsupported_encryption_key_is_rejected(parties):
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    north, (client, server) = parties["north"], new_sessions(parties)
    fields = unpack(bytes.fromhex(unpack(client.hello())["body"]))
    for key in (rsa.generate_private_key(65537, 1024), ec.generate_private_key(ec.SECP256R1())):
        der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        body = pack(fields | {"encryption_key": der.hex()})
        signed = pack({"public_key": north.public_key.hex(), "body": body.hex(), "signature": north.sign(body).hex()})
        with pytest.raises(
            HandshakeError, match="encryption key of 'north' is rejected: The public key is not an RSA key of 2048"
        ):
            server.reply(signed)


def test_calls_out_of_order_raise_error(parties):
    client, server = new_sessions(parties)
    with pytest.raises(HandshakeError, match="Call hello\\(\\) to begin a handshake"):
        client.finish(b"")
    with pytest.raises(HandshakeError, match="Pass its hello to reply\\(\\) first"):
        server.complete(b"")
    for call in (client.end_step, lambda: client.seal(b""), lambda: server.open(bytes(28))):
        with pytest.raises(EncryptionError, match="Complete the handshake first"):
            call()
