"""The handshake that gives a client and the server of a split model their keys, and who may try to be in it."""

from __future__ import annotations

import random

import pytest
from sessions import ends, flipped

from hf_federated.messages.serialization import pack, unpack
from hf_federated.security.encryption import (
    ClientSession,
    EncryptionError,
    HandshakeError,
    Identity,
    ServerSession,
)


def test_the_pinned_fingerprint_decides_and_names_the_party(parties):
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


def test_a_relay_cannot_pose_as_the_server(parties):
    north, center = parties["north"], parties["center"]
    impostor = Identity.generate("center", 2048)
    client = ClientSession(north, "center", center.fingerprint, rsa_bits=2048)
    relay = ServerSession(impostor, "north", north.fingerprint, rsa_bits=2048)
    hello = client.hello()
    with pytest.raises(HandshakeError, match="receiver_fingerprint"):
        relay.reply(hello)
    # It answers all the same, with a hash of the hello, as it can.
    fields = unpack(bytes.fromhex(unpack(hello)["body"])) | {"receiver_fingerprint": impostor.fingerprint}
    body = pack(fields)
    patched = pack({"public_key": north.public_key.hex(), "body": body.hex(), "signature": north.sign(body).hex()})
    with pytest.raises(HandshakeError, match=f"key {impostor.fingerprint}.*pinned for 'center'.*poses as it"):
        client.finish(relay.reply(patched))


def test_a_client_cannot_pose_as_another(parties):
    south, center = parties["south"], parties["center"]
    posing = Identity("north", south._private_key)
    client = ClientSession(posing, "center", center.fingerprint, rsa_bits=2048)
    _, server = ends(parties, "north")
    with pytest.raises(HandshakeError, match="pinned for 'north'"):
        server.reply(client.hello())


@pytest.mark.parametrize("which", ["hello", "reply", "finish"])
def test_a_changed_handshake_is_refused_and_the_right_one_still_counts(parties, which):
    client, server = ends(parties)
    hello = client.hello()
    reply = server.reply(hello)
    wires = {"hello": (hello, server.reply), "reply": (reply, client.finish)}
    if which == "finish":
        wires["finish"] = (client.finish(reply), server.complete)
    message, receive = wires[which]
    bits = [*range(128), *random.Random(0).sample(range(len(message) * 8), 150), len(message) * 8 - 1]
    for bit in bits:
        with pytest.raises(HandshakeError, match=f"{which} of '(north|center)'"):
            receive(flipped(message, bit))
    for other in (b"", message[:-1], message + b" ", message[:100], bytes(1 << 17), b"\x80" * 64):
        with pytest.raises(HandshakeError):
            receive(other)
    if which == "hello":
        server.complete(client.finish(server.reply(hello)))
    elif which == "reply":
        server.complete(client.finish(reply))
    else:
        server.complete(message)
    assert server.open(client.seal(b"states")) == b"states"


def test_what_a_signature_does_not_cover_has_one_form(parties):
    client, server = ends(parties)
    outer = unpack(client.hello())
    for other in (
        outer | {"more": ""},
        {name: outer[name] for name in ("body", "public_key", "signature")},
        outer | {"body": outer["body"].upper()},
        {name: outer[name] for name in ("body", "signature")},
        list(outer.values()),
        outer | {"signature": 3},
    ):
        with pytest.raises(HandshakeError, match="hello of 'north'"):
            server.reply(pack(other))


@pytest.mark.parametrize("key", ["encryption_key", "wrapped_secret"])
def test_another_reply_of_the_server_is_refused(parties, key):
    """Fields of two replies, both signed by the server, do not mix, and a reply fits one hello only."""
    client, server = ends(parties)
    other_client, _ = ends(parties)
    reply = server.reply(client.hello())
    foreign = server.reply(other_client.hello())
    with pytest.raises(HandshakeError, match="reply of 'center' says transcript"):
        client.finish(foreign)
    body = pack(
        unpack(bytes.fromhex(unpack(reply)["body"])) | {key: unpack(bytes.fromhex(unpack(foreign)["body"]))[key]}
    )
    with pytest.raises(HandshakeError, match="signature"):
        client.finish(pack(unpack(reply) | {"body": body.hex()}))


def test_a_recorded_handshake_cannot_be_replayed(parties):
    client, server = ends(parties)
    hello = client.hello()
    finish = client.finish(server.reply(hello))
    server.complete(finish)
    again = ServerSession(parties["center"], "north", parties["north"].fingerprint, rotate_every=None, rsa_bits=2048)
    again.reply(hello)  # answered, but what was recorded does not end it
    with pytest.raises(HandshakeError, match="finish of 'north' says transcript"):
        again.complete(finish)
    assert again.epoch is None
    with pytest.raises(EncryptionError, match="no keys with 'north' yet"):
        again.open(client.seal(b"states"))


def test_a_message_is_not_taken_for_another_of_the_handshake(parties):
    client, server = ends(parties)
    hello = client.hello()
    reply = server.reply(hello)
    with pytest.raises(HandshakeError, match="pinned for 'center'"):
        client.finish(hello)
    with pytest.raises(HandshakeError, match="other fields|says message"):
        server.complete(hello)
    with pytest.raises(HandshakeError, match="pinned for 'north'"):
        server.reply(reply)


def test_parties_agree_on_rotate_every(parties):
    client, _ = ends(parties, rotate_every=50)
    _, server = ends(parties, rotate_every=100)
    with pytest.raises(HandshakeError, match="rotate_every = 50; 'center' expects 100. Give both parties the same"):
        server.reply(client.hello())


def test_fields_of_a_signed_message_are_checked_by_type(parties):
    """A client of ours, but with another program."""
    north, client_server = parties["north"], ends(parties, rotate_every=1)
    fields = unpack(bytes.fromhex(unpack(client_server[0].hello())["body"]))
    for changed in ({"rotate_every": True}, {"epoch": False}, {"encryption_key": 3}, {"encryption_key": "zz"}):
        body = pack(fields | changed)
        signed = pack({"public_key": north.public_key.hex(), "body": body.hex(), "signature": north.sign(body).hex()})
        with pytest.raises(HandshakeError, match="hello of 'north'"):
            client_server[1].reply(signed)


def test_an_encryption_key_that_is_no_good_is_refused(parties):
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    north, (client, server) = parties["north"], ends(parties)
    fields = unpack(bytes.fromhex(unpack(client.hello())["body"]))
    for key in (rsa.generate_private_key(65537, 1024), ec.generate_private_key(ec.SECP256R1())):
        der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        body = pack(fields | {"encryption_key": der.hex()})
        signed = pack({"public_key": north.public_key.hex(), "body": body.hex(), "signature": north.sign(body).hex()})
        with pytest.raises(
            HandshakeError, match="encryption key of 'north' is refused: Not an RSA public key of 2048"
        ):
            server.reply(signed)


def test_calls_out_of_turn_are_refused(parties):
    client, server = ends(parties)
    with pytest.raises(HandshakeError, match="hello\\(\\) begins one"):
        client.finish(b"")
    with pytest.raises(HandshakeError, match="its hello comes first"):
        server.complete(b"")
    for call in (client.end_step, lambda: client.seal(b""), lambda: server.open(bytes(28))):
        with pytest.raises(EncryptionError, match="the handshake comes first"):
            call()
