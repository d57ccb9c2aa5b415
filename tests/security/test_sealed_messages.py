"""Messages between a client and the server of a split model: sealed, opened once, in order, sent again where lost."""

from __future__ import annotations

import copy
import os
import pickle
import random
import struct
import sys
import threading

import pytest
from sessions import MIB, connected, flipped, shake_hands

from hf_federated.security.encryption import (
    EncryptionError,
    MessageError,
    RepeatedMessageError,
)


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
