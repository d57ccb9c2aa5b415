"""Sealed messages between a client and the server of a split model, and the handshakes that give them keys."""

from __future__ import annotations

import copy
import hmac
import logging
import os
import pickle
import random
import struct
import sys
import threading

import pytest

from hf_federated.packing import pack, unpack
from hf_federated.split import sealing
from hf_federated.split.encryption import (
    ClientSession,
    EncryptionError,
    HandshakeError,
    Identity,
    MessageError,
    RepeatedMessageError,
    RotationDueError,
    ServerSession,
    fingerprint,
)
from hf_federated.split.handshake import ClientExchange, Parties, Place, ServerExchange, _derive


MIB = 1 << 20


@pytest.fixture(scope="module")
def parties() -> dict[str, Identity]:
    return {name: Identity.generate(name, 2048) for name in ("north", "south", "center")}


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


@pytest.fixture(scope="module")
def lasting(parties) -> tuple[ClientSession, ServerSession]:
    """A connected pair for tests that leave both ends in step."""
    return connected(parties)


def flipped(message: bytes, bit: int) -> bytes:
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# Sealing and opening.


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, MIB])
def test_bytes_come_back_as_they_were_with_28_more_on_the_way(lasting, size):
    payload = random.Random(size).randbytes(size)
    for sender, receiver in (lasting, lasting[::-1]):
        sealed = sender.seal(payload)
        assert len(sealed) == size + 12 + 16
        assert receiver.open(sealed) == payload


def test_other_buffers_are_sealed_and_opened_as_bytes_are(lasting):
    client, server = lasting
    wide = memoryview(struct.pack(">3q", 1, 2, 3)).cast("q")
    assert server.open(bytearray(client.seal(wide))) == bytes(wide)
    assert server.open(memoryview(client.seal(bytearray(b"states")))) == b"states"


def test_the_payload_and_its_kind_are_not_on_the_wire(lasting):
    client, server = lasting
    payload, kind = b"who reads this knows the text", "forward-of-a-step"
    sealed = client.seal(payload, kind)
    assert payload not in sealed and kind.encode() not in sealed
    assert server.open(sealed, kind) == payload


def test_every_changed_bit_is_refused_and_the_right_message_still_opens(lasting):
    client, server = lasting
    payload = bytes(range(64))
    sealed = client.seal(payload)
    for bit in range(len(sealed) * 8):
        # Of the steps' half of the nonce only the tag tells, of the others the order does already.
        with pytest.raises(MessageError, match="'north'"):
            server.open(flipped(sealed, bit))
    assert server.open(sealed) == payload


def test_sampled_changed_bits_of_a_large_message_are_refused(lasting):
    client, server = lasting
    payload = bytes(MIB)
    sealed = client.seal(payload)
    for bit in random.Random(0).sample(range(len(sealed) * 8), 20):
        with pytest.raises(MessageError):
            server.open(flipped(sealed, bit))
    assert server.open(sealed) == payload


def test_a_cut_or_lengthened_message_is_refused(lasting):
    client, server = lasting
    sealed = client.seal(b"states")
    for cut in (sealed[:0], sealed[:27]):
        with pytest.raises(MessageError, match=f"'north' has {len(cut)} bytes and was cut"):
            server.open(cut)
    for other in (sealed[:-1], sealed[:28], sealed + b"\0", sealed[:12] + sealed[13:]):
        with pytest.raises(MessageError, match="not authentic"):
            server.open(other)
    assert server.open(sealed) == b"states"


def test_nonces_never_repeat_over_directions_and_epochs(parties):
    client, server = connected(parties, rotate_every=1)
    nonces: set[bytes] = set()
    keys = set()
    for epoch in range(3):
        keys |= {client._keys.client_to_server, client._keys.server_to_client}
        for _ in range(1000):
            for sender, receiver in ((client, server), (server, client)):
                sealed = sender.seal(b"")
                receiver.open(sealed)
                nonces.add(sealed[:12])
        client.end_step()
        if epoch < 2:
            shake_hands(client, server)
    assert len(nonces) == 3 * 1000 * 2
    assert len(keys) == 3 * 2


def test_nonces_never_repeat_among_threads(parties):
    client, server = connected(parties)
    sealed: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: sealed.extend(client.seal(b"states") for _ in range(200))) for _ in range(4)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len({message[:12] for message in sealed}) == 800
    for message in sorted(sealed):
        assert server.open(message) == b"states"


def test_the_nonce_is_direction_epoch_steps_and_number(parties):
    client, server = connected(parties, rotate_every=3)
    shake_hands(client, server)
    for _ in range(2):
        client.end_step()
    server.open(client.seal(b""))
    assert struct.unpack(">III", client.seal(b"")[:12]) == (1, 2, 1)
    assert struct.unpack(">III", server.seal(b"")[:12]) == (1 << 31 | 1, 2, 0)


# What an attacker on the wire may try.


def test_an_old_message_is_refused(parties):
    client, server = connected(parties)
    old = [client.seal(b"%d" % number) for number in range(3)]
    for sealed in old:
        server.open(sealed)
    for number in range(2):
        with pytest.raises(MessageError, match=f"Message {number} of 'north' was opened before: replayed"):
            server.open(old[number])
    assert server.open(client.seal(b"next")) == b"next"


def test_messages_out_of_order_are_refused_until_the_missing_one_comes(parties):
    client, server = connected(parties)
    first, second = client.seal(b"first"), client.seal(b"second")
    with pytest.raises(MessageError, match="Message 1 of 'north' came before message 0: lost or out of order"):
        server.open(second)
    assert [server.open(first), server.open(second)] == [b"first", b"second"]


def test_a_reflected_message_is_refused(lasting):
    client, server = lasting
    sealed = client.seal(b"states")
    with pytest.raises(MessageError, match="A message to 'center' came back as one of 'center'"):
        client.open(sealed)
    # With the direction bit set right it fails by its key.
    with pytest.raises(MessageError, match="not authentic|before"):
        client.open(flipped(sealed, 7))
    server.open(sealed)


def test_the_directions_have_different_keys(lasting):
    assert lasting[0]._keys.client_to_server != lasting[0]._keys.server_to_client
    assert lasting[0]._keys == lasting[1]._keys


def test_a_message_of_another_session_is_refused(parties, lasting):
    _, server = connected(parties)
    client, _ = connected(parties)
    with pytest.raises(MessageError, match="not authentic: .* another session"):
        server.open(client.seal(b"states"))


def test_another_clients_message_is_refused(parties):
    _, server = connected(parties, "north")
    south, its_server = connected(parties, "south")
    sealed = south.seal(b"states")
    with pytest.raises(MessageError, match="of 'north' is not authentic"):
        server.open(sealed)
    assert its_server.open(sealed) == b"states"


def test_a_message_opens_only_as_its_kind(parties):
    client, server = connected(parties)
    sealed = client.seal(b"states", "forward")
    for kind in ("backward", "data", "", "forward "):
        with pytest.raises(MessageError, match=f"no message of the kind '{kind}'"):
            server.open(sealed, kind)
    assert server.open(sealed, "forward") == b"states"


# Lost messages and lost sessions.


def test_a_lost_request_is_sent_again_as_the_same_bytes(parties):
    client, server = connected(parties)
    sealed = client.seal(b"states", "forward")
    # It never arrived; the transport has kept the bytes.
    assert server.open(sealed, "forward") == b"states"


def test_a_lost_answer_is_sent_again_without_doing_the_work_twice(parties):
    client, server = connected(parties)
    request = client.seal(b"states", "forward")
    server.open(request, "forward")
    answer = server.seal(b"outputs", "forward")
    # The answer was lost, the client sends its request again.
    with pytest.raises(RepeatedMessageError, match="Message 0 of 'north' came again"):
        server.open(request, "forward")
    assert client.open(answer, "forward") == b"outputs"
    # And where it was only late, the second copy of the answer is known as one.
    with pytest.raises(RepeatedMessageError):
        client.open(answer, "forward")
    assert server.open(client.seal(b"next")) == b"next"


def test_a_changed_repetition_is_no_repetition(parties):
    client, server = connected(parties)
    request = client.seal(b"states", "forward")
    server.open(request, "forward")
    for changed, kind in ((flipped(request, 200), "forward"), (request, "backward")):
        with pytest.raises(MessageError) as error:
            server.open(changed, kind)
        assert not isinstance(error.value, RepeatedMessageError)


def test_the_last_message_of_a_step_is_known_as_repeated_when_a_rotation_is_due(parties):
    client, server = connected(parties, rotate_every=1)
    request = client.seal(b"gradients")
    server.open(request)
    client.end_step()
    with pytest.raises(RepeatedMessageError):
        server.open(request)


def test_a_new_session_takes_payloads_sealed_anew_and_no_old_message(parties):
    client, server = connected(parties)
    lost = client.seal(b"states")
    client, server = connected(parties)
    with pytest.raises(MessageError, match="not authentic"):
        server.open(lost)
    assert server.open(client.seal(b"states")) == b"states"


def test_a_session_is_neither_copied_nor_stored(lasting):
    for session in lasting:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="would repeat nonces"):
                make(session)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_cannot_seal(lasting):
    child = os.fork()
    if child == 0:
        try:
            lasting[0].seal(b"states")
        except EncryptionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Rotation.


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


# The handshake.


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


# Keys and settings.


def test_rsa_keys_have_3072_bits_unless_said_otherwise(parties):
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    north, center = parties["north"], parties["center"]
    hello = ClientSession(north, "center", center.fingerprint).hello()
    der = bytes.fromhex(unpack(bytes.fromhex(unpack(hello)["body"]))["encryption_key"])
    assert load_der_public_key(der).key_size == 3072


def test_no_secret_is_in_a_text(parties, caplog):
    caplog.set_level(logging.DEBUG)
    client, server = connected(parties, rotate_every=1)
    client.end_step()
    shake_hands(client, server)
    client.hello()
    keys = client._keys
    numbers = [identity._private_key.private_numbers() for identity in parties.values()]
    secrets = [keys.client_to_server, keys.server_to_client, keys.chain]
    forms = [form for secret in secrets for form in (repr(secret)[2:-1], secret.hex(), str(list(secret))[1:-1])]
    forms += [form for number in numbers for form in (str(number.d), f"{number.d:x}", str(number.p), str(number.q))]
    shown = [parties["north"], client, server, keys, Place.after(keys), client._exchange, client._parties]
    texts = [text for item in shown for text in (repr(item), str(item))] + [caplog.text]
    texts += [repr(vars(item)) for item in (parties["north"], client, server, *client._directions)]
    assert not [form for form in forms if any(form in text for text in texts)]
    assert repr(client) == "ClientSession('north' with 'center', epoch=1, steps=0, sealed=1, opened=0)"


def test_fingerprints_are_the_digest_of_the_public_key(parties):
    import hashlib

    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    north = parties["north"]
    public = north._private_key.public_key()
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert north.fingerprint == fingerprint(pem) == f"sha256:{hashlib.sha256(der).hexdigest()}"
    with pytest.raises(EncryptionError, match="Neither a certificate nor a public key"):
        fingerprint(b"north")
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    with pytest.raises(EncryptionError, match="not of an RSA key"):
        fingerprint(curve.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def test_an_identity_comes_from_a_private_key_file(parties):
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = parties["north"]._private_key
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    assert Identity.from_pem("north", pem).fingerprint == parties["north"].fingerprint
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    for wrong in (locked, b"", pem[:200]):
        with pytest.raises(EncryptionError, match="key of 'north' is no private key in PEM without a password"):
            Identity.from_pem("north", wrong)


def test_settings_that_are_not_allowed_are_refused(parties):
    north, pin = parties["north"], parties["center"].fingerprint
    with pytest.raises(ValueError, match="rsa_bits is 1024; allowed are 2048 to 8192"):
        ClientSession(north, "center", pin, rsa_bits=1024)
    with pytest.raises(ValueError, match="rotate_every is 0; allowed are 1 step or more"):
        ClientSession(north, "center", pin, rotate_every=0)
    for wrong in ("", pin.upper(), pin[7:], pin + "\n"):
        with pytest.raises(ValueError, match="given for 'center' is .*64 lower-case hex digits"):
            ClientSession(north, "center", wrong)
    with pytest.raises(ValueError, match="rsa_bits is 1024"):
        Identity.generate("north", 1024)
    with pytest.raises(ValueError, match="empty string"):
        Identity("", north._private_key)


def test_without_cryptography_the_error_names_the_extra(parties, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pin = parties["center"].fingerprint
    for make in (
        lambda: ClientSession(parties["north"], "center", pin),
        lambda: Identity.generate("north"),
        lambda: Identity.from_pem("north", b""),
        lambda: fingerprint(b""),
    ):
        with pytest.raises(
            ImportError, match=r"needs cryptography. Install it with: pip install hf-federated\[split\]"
        ):
            make()
