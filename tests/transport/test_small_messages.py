"""Small messages, which travel by a unary call: sizes at the limits, broken connections, and hostile clients."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from loopback import CountingAnswer, Relay, certificates, join, serve, wait_until

from hf_federated.transport import ServerUnreachableError, SessionLostError, TlsCredentials
from hf_federated.transport.protocol import CHUNK_BYTES, MAX_SMALL_MESSAGE_BYTES, VERSION, MessageHeader


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


def raw_call(tls: Path, address: str, method: str, request: bytes) -> bytes:
    """Call a method of the server as `north`, without the checks of `GrpcLink`."""
    files = TlsCredentials.of_client(tls, "north")
    credentials = grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)
    with grpc.secure_channel(address, credentials) as channel:
        return channel.unary_unary(f"/hf_federated.Sessions/{method}")(request, timeout=10)


@pytest.mark.parametrize("num_answer_bytes", [0, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_messages_and_answers_at_the_limits_are_exchanged_once(tls, excess, num_answer_bytes):
    messages = [bytes([number]) * (MAX_SMALL_MESSAGE_BYTES + excess) for number in range(3)]
    processed: list[bytes] = []

    def answer(client_id: str, message: bytes) -> bytes:
        processed.append(bytes(message))
        return message[:1] * num_answer_bytes

    with serve(tls, answer) as server, join(tls, server) as link:
        answers = [link.exchange(message) for message in messages]
    assert answers == [message[:1] * num_answer_bytes for message in messages]
    assert processed == messages


def test_large_and_small_answers_alternate(tls):
    answer = CountingAnswer()
    contents = [b"a", b"b" * (CHUNK_BYTES + 1), b"c", b"d"]
    with serve(tls, lambda client, message: answer(client, message) + contents[len(answer.processed) - 1]) as server:
        with join(tls, server) as link:
            answers = [link.exchange(b"") for _ in contents]
    assert answers == [f"{number}: ".encode() + content for number, content in enumerate(contents, start=1)]


def test_small_message_repeated_during_processing_waits_for_the_same_outcome(tls):
    answer, started, release = CountingAnswer(), threading.Event(), threading.Event()
    answer.action = lambda message: started.set() or release.wait(10)
    with serve(tls, answer) as server, Relay(server) as relay, join(tls, relay) as link, ThreadPoolExecutor(1) as pool:
        answered = pool.submit(link.exchange, b"a")
        assert started.wait(10)
        relay.cut()
        wait_until(lambda: len(relay.connections) > 1 and relay.connections[-1] > 1 << 10)
        assert not answered.done()
        release.set()
        assert answered.result(10) == b"1: a"
    assert answer.processed == [b"a"]


def test_large_answer_that_is_lost_is_sent_again_without_repeating_work(tls):
    answer, content = CountingAnswer(), bytes(range(256)) * (1 << 14)
    with serve(tls, lambda client, message: answer(client, message) + content) as server, Relay(server) as relay:
        relay.cut_after = 2 << 20
        with join(tls, relay) as link:
            assert link.exchange(b"a") == b"1: a" + content
        assert len(relay.connections) == 2
    assert answer.processed == [b"a"]


def test_heartbeats_that_get_no_answer_end_a_small_message(tls):
    """The link must not wait for `answer_timeout`, which is longer than this test."""
    answer, release = CountingAnswer(), threading.Event()

    def silence(message: bytes) -> None:
        relay.num_silenced = 1 << 20
        release.wait(20)

    answer.action = silence
    with serve(tls, answer) as server, Relay(server) as relay:
        link = join(tls, relay, reconnect_timeout=1.0, answer_timeout=600.0)
        began_at = time.monotonic()
        with pytest.raises(ServerUnreachableError):
            link.exchange(b"a")
        assert time.monotonic() - began_at < 10
        release.set()
        link.close()


def test_client_that_is_expelled_during_a_small_message_receives_the_reason(tls):
    answer, started, release = CountingAnswer(), threading.Event(), threading.Event()
    answer.action = lambda message: started.set() or release.wait(10)
    with serve(tls, answer) as server, join(tls, server) as link, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(link.exchange, b"a")
        assert started.wait(10)
        server.expel("north", "It sent nonsense.")
        with pytest.raises(SessionLostError, match="It sent nonsense"):
            pending.result(10)
        release.set()


@pytest.mark.parametrize(
    ("num_announced", "message", "text"),
    [
        (3, b"ab", "a message of 3 bytes, but 2 bytes arrived"),
        (3, b"abcd", "a message of 3 bytes, but more bytes arrived"),
        (3, bytes(MAX_SMALL_MESSAGE_BYTES + 1), f"has at most {MAX_SMALL_MESSAGE_BYTES}"),
        (1 << 20, b"abc", "a message of 1048576 bytes, but 3 bytes arrived"),
        (1 << 40, b"abc", "has 1099511627776 bytes, but the server accepts at most"),
    ],
)
def test_small_message_that_contradicts_its_header_is_rejected(tls, num_announced, message, text):
    answer = CountingAnswer()
    with serve(tls, answer) as server, join(tls, server) as link:
        header = MessageHeader(link.session_id, 0, "t", num_announced, 0)
        with pytest.raises(grpc.RpcError) as error:
            raw_call(tls, server.address, "ExchangeSmall", header.to_prefix() + message)
        assert error.value.code().name == "INVALID_ARGUMENT" and text in error.value.details()
        assert not answer.processed
        assert link.exchange(b"a") == b"1: a"


@pytest.mark.parametrize(
    "request_", [b"", b"\x00\x00", b"\x00\x00\x00\x00", b"\xff\xff\xff\xff{}", b"\x00\x00\x00\x02{}"]
)
def test_small_message_without_a_header_is_rejected(tls, request_):
    with serve(tls, CountingAnswer()) as server, pytest.raises(grpc.RpcError) as error:
        raw_call(tls, server.address, "ExchangeSmall", request_)
    assert error.value.code().name == "INVALID_ARGUMENT"


def test_client_of_the_previous_protocol_is_refused_with_both_versions(tls):
    request: dict[str, Any] = {"version": VERSION - 1, "client_id": "north", "process": "p", "terms": {}}
    with serve(tls, CountingAnswer()) as server, pytest.raises(grpc.RpcError) as error:
        raw_call(tls, server.address, "Connect", json.dumps(request).encode())
    assert error.value.code().name == "FAILED_PRECONDITION"
    assert (
        f"uses version {VERSION} of the protocol, but the client uses version {VERSION - 1}" in error.value.details()
    )
