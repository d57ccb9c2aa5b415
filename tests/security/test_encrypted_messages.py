"""Encrypted messages between a client and the server: round trip, order, attacks and lost messages."""

from __future__ import annotations

import copy
import os
import pickle
import random
import struct
import sys
import threading

import pytest
from sessions import MIB, connected_sessions, flip_bit, perform_handshake

from hf_federated.security.encrypted_session import (
    EncryptionError,
    MessageError,
    RepeatedMessageError,
)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, MIB])
def test_round_trip_returns_payload_and_adds_28_bytes(shared_sessions, size):
    payload = random.Random(size).randbytes(size)
    for sender, receiver in (shared_sessions, shared_sessions[::-1]):
        sealed = sender.seal(payload)
        assert len(sealed) == size + 12 + 16
        assert receiver.open(sealed) == payload


def test_buffers_are_treated_as_bytes(shared_sessions):
    client, server = shared_sessions
    wide = memoryview(struct.pack(">3q", 1, 2, 3)).cast("q")
    assert server.open(bytearray(client.seal(wide))) == bytes(wide)
    assert server.open(memoryview(client.seal(bytearray(b"states")))) == b"states"


def test_encrypted_message_contains_neither_payload_nor_kind(shared_sessions):
    client, server = shared_sessions
    payload, kind = b"who reads this knows the text", "forward-of-a-step"
    sealed = client.seal(payload, kind)
    assert payload not in sealed and kind.encode() not in sealed
    assert server.open(sealed, kind) == payload


def test_every_flipped_bit_is_rejected_and_original_message_still_opens(shared_sessions):
    client, server = shared_sessions
    payload = bytes(range(64))
    sealed = client.seal(payload)
    for bit in range(len(sealed) * 8):
        # The tag protects the step count in the nonce. The order check already rejects changes of the other parts.
        with pytest.raises(MessageError, match="'north'"):
            server.open(flip_bit(sealed, bit))
    assert server.open(sealed) == payload


def test_flipped_bits_of_large_message_are_rejected(shared_sessions):
    client, server = shared_sessions
    payload = bytes(MIB)
    sealed = client.seal(payload)
    for bit in random.Random(0).sample(range(len(sealed) * 8), 20):
        with pytest.raises(MessageError):
            server.open(flip_bit(sealed, bit))
    assert server.open(sealed) == payload


def test_truncated_or_extended_message_is_rejected(shared_sessions):
    client, server = shared_sessions
    sealed = client.seal(b"states")
    for cut in (sealed[:0], sealed[:27]):
        with pytest.raises(MessageError, match=f"'north' has {len(cut)} bytes.* this message was truncated"):
            server.open(cut)
    for changed in (sealed[:-1], sealed[:28], sealed + b"\0", sealed[:12] + sealed[13:]):
        with pytest.raises(MessageError, match="not authentic"):
            server.open(changed)
    assert server.open(sealed) == b"states"


def test_nonces_are_unique_across_directions_and_epochs(parties, epoch_keys):
    client, server = connected_sessions(parties, rotate_every=1)
    nonces: set[bytes] = set()
    for epoch in range(3):
        for _ in range(1000):
            for sender, receiver in ((client, server), (server, client)):
                sealed = sender.seal(b"")
                receiver.open(sealed)
                nonces.add(sealed[:12])
        client.end_step()
        if epoch < 2:
            perform_handshake(client, server)
    assert len(nonces) == 3 * 1000 * 2
    keys = [(epoch.client_to_server, epoch.server_to_client) for epoch in epoch_keys["client"]]
    assert len({key for pair in keys for key in pair}) == 3 * 2


def test_nonces_are_unique_across_threads(parties):
    client, server = connected_sessions(parties)
    sealed: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: sealed.extend(client.seal(b"states") for _ in range(200))) for _ in range(4)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads interrupt each other
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


def test_nonce_contains_direction_epoch_steps_and_number(parties):
    client, server = connected_sessions(parties, rotate_every=3)
    perform_handshake(client, server)
    for _ in range(2):
        client.end_step()
    server.open(client.seal(b""))
    assert struct.unpack(">III", client.seal(b"")[:12]) == (1, 2, 1)
    assert struct.unpack(">III", server.seal(b"")[:12]) == (1 << 31 | 1, 2, 0)


# Attacks on the network.


def test_replayed_message_is_rejected(parties):
    client, server = connected_sessions(parties)
    old = [client.seal(b"%d" % number) for number in range(3)]
    for sealed in old:
        server.open(sealed)
    for number in range(2):
        with pytest.raises(MessageError, match=f"Message {number} of 'north' was opened before: it was replayed"):
            server.open(old[number])
    assert server.open(client.seal(b"next")) == b"next"


def test_out_of_order_message_is_rejected_until_missing_message_arrives(parties):
    client, server = connected_sessions(parties)
    first, second = client.seal(b"first"), client.seal(b"second")
    with pytest.raises(MessageError, match="Message 1 of 'north' arrived before message 0: .* lost, .* out of order"):
        server.open(second)
    assert [server.open(first), server.open(second)] == [b"first", b"second"]


def test_reflected_message_is_rejected(shared_sessions):
    client, server = shared_sessions
    sealed = client.seal(b"states")
    with pytest.raises(MessageError, match="A message to 'center' arrived as a message of 'center': it was reflected"):
        client.open(sealed)
    # With the direction bit of the client, the message still fails because each direction has its own key.
    with pytest.raises(MessageError, match="not authentic|before"):
        client.open(flip_bit(sealed, 7))
    server.open(sealed)


def test_directions_have_different_keys(parties, epoch_keys):
    connected_sessions(parties)
    (keys,) = epoch_keys["client"]
    assert keys.client_to_server != keys.server_to_client
    assert epoch_keys["server"] == [keys]


def test_message_of_another_session_is_rejected(parties, shared_sessions):
    _, server = connected_sessions(parties)
    client, _ = connected_sessions(parties)
    with pytest.raises(MessageError, match="not authentic: .* another session"):
        server.open(client.seal(b"states"))


def test_message_of_another_client_is_rejected(parties):
    _, server = connected_sessions(parties, "north")
    south, its_server = connected_sessions(parties, "south")
    sealed = south.seal(b"states")
    with pytest.raises(MessageError, match="of 'north' is not authentic"):
        server.open(sealed)
    assert its_server.open(sealed) == b"states"


def test_message_opens_only_with_its_kind(parties):
    client, server = connected_sessions(parties)
    sealed = client.seal(b"states", "forward")
    for kind in ("backward", "data", "", "forward "):
        with pytest.raises(MessageError, match=f"does not have the kind '{kind}'"):
            server.open(sealed, kind)
    assert server.open(sealed, "forward") == b"states"


# Lost messages and lost sessions.


def test_lost_request_can_be_sent_again(parties):
    client, server = connected_sessions(parties)
    sealed = client.seal(b"states", "forward")
    # The first transmission was lost. The transport kept the bytes.
    assert server.open(sealed, "forward") == b"states"


def test_repeated_request_after_lost_answer_is_recognized(parties):
    client, server = connected_sessions(parties)
    request = client.seal(b"states", "forward")
    server.open(request, "forward")
    answer = server.seal(b"outputs", "forward")
    # The answer was lost, and the client sends the request again.
    with pytest.raises(RepeatedMessageError, match="Message 0 of 'north' arrived again"):
        server.open(request, "forward")
    assert client.open(answer, "forward") == b"outputs"
    # If the first answer was only late, the client recognizes the second copy.
    with pytest.raises(RepeatedMessageError):
        client.open(answer, "forward")
    assert server.open(client.seal(b"next")) == b"next"


def test_changed_repetition_is_not_recognized_as_repetition(parties):
    client, server = connected_sessions(parties)
    request = client.seal(b"states", "forward")
    server.open(request, "forward")
    for changed, kind in ((flip_bit(request, 200), "forward"), (request, "backward")):
        with pytest.raises(MessageError) as error:
            server.open(changed, kind)
        assert not isinstance(error.value, RepeatedMessageError)


def test_repeated_message_is_recognized_when_rotation_is_due(parties):
    client, server = connected_sessions(parties, rotate_every=1)
    request = client.seal(b"gradients")
    server.open(request)
    client.end_step()
    with pytest.raises(RepeatedMessageError):
        server.open(request)


def test_new_session_rejects_messages_of_lost_session(parties):
    client, server = connected_sessions(parties)
    lost = client.seal(b"states")
    client, server = connected_sessions(parties)
    with pytest.raises(MessageError, match="not authentic"):
        server.open(lost)
    assert server.open(client.seal(b"states")) == b"states"


def test_session_cannot_be_copied_or_pickled(shared_sessions):
    for session in shared_sessions:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="would repeat nonces"):
                make(session)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_cannot_encrypt(shared_sessions):
    child = os.fork()
    if child == 0:
        try:
            shared_sessions[0].seal(b"states")
        except EncryptionError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
