"""Exactly-once processing of messages, and the limit of concurrent messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from loopback import CLIENTS, Relay, certificates, join, serve, wait_until

from hf_federated.transport import AnswerTimeoutError, LinkError, ServerUnreachableError
from hf_federated.transport.errors import RequestRejectedError
from hf_federated.transport.exactly_once import ExactlyOnceExecutor
from hf_federated.transport.protocol import HEADER_KEY, MessageHeader, Outcome


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


class CountingAnswer:
    """
    Answers every message with the number of processed messages and the message.

    Attributes:
        processed (`list[bytes]`): The processed messages.
        action (`Callable[[bytes], object]`): Called while a message is processed. Tests cut the connection or wait.
    """

    def __init__(self) -> None:
        self.processed: list[bytes] = []
        self.action = lambda message: None

    def __call__(self, client_id: str, message: bytes) -> bytes:
        self.processed.append(message)
        self.action(message)
        return f"{len(self.processed)}: ".encode() + message


def test_message_with_lost_answer_is_processed_once(tls):
    answer = CountingAnswer()
    with serve(tls, answer) as server, Relay(server) as relay, join(tls, relay) as link:
        answer.action = lambda message: relay.cut() if message == b"b" else None
        assert [link.exchange(message) for message in (b"a", b"b", b"c")] == [b"1: a", b"2: b", b"3: c"]
        assert answer.processed == [b"a", b"b", b"c"] and len(relay.connections) == 2


def test_interrupted_answer_is_sent_again_completely(tls):
    content = bytes(range(256)) * (1 << 15)
    with serve(tls, lambda _, message: content) as server, Relay(server) as relay:
        relay.cut_after = 3 << 20
        with join(tls, relay) as link:
            assert link.exchange(b"a") == content
        assert len(relay.connections) == 2


def test_interrupted_message_is_processed_once(tls):
    answer, content = CountingAnswer(), bytes(range(256)) * (1 << 15)
    with serve(tls, answer, max_exchanges=1) as server, Relay(server) as relay:
        relay.cut_after = 3 << 20
        with join(tls, relay) as link:
            assert link.exchange(content) == b"1: " + content
        assert answer.processed == [content] and len(relay.connections) >= 2


def is_sent_again(relay: Relay, num_repetitions: int) -> Callable[[], bool]:
    """A condition: a large message is being sent again over a new connection."""
    return lambda: len(relay.connections) > num_repetitions and relay.connections[-1] > 1 << 15


def test_message_repeated_during_processing_waits_for_the_same_outcome(tls):
    answer, started, release = CountingAnswer(), threading.Event(), threading.Event()
    answer.action = lambda message: started.set() or release.wait(10)
    content = bytes(1 << 17)
    with serve(tls, answer) as server, Relay(server) as relay, join(tls, relay) as link:
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(link.exchange, content)
            assert started.wait(10)
            for num_repetitions in (1, 2):
                relay.cut()
                wait_until(is_sent_again(relay, num_repetitions))
            assert not answered.done()
            release.set()
            assert answered.result(10) == b"1: " + content
    assert answer.processed == [content]


def test_lost_error_is_sent_again_without_repeating_work(tls):
    answer = CountingAnswer()

    def refuse(message: bytes) -> None:
        relay.cut()
        raise ValueError(f"refused {len(answer.processed)}")

    answer.action = refuse
    with serve(tls, answer) as server, Relay(server) as relay, join(tls, relay) as link:
        with pytest.raises(ValueError, match="refused 1"):
            link.exchange(b"a")
        assert answer.processed == [b"a"]


def test_permanently_broken_connection_ends_link_after_reconnect_timeout(tls):
    with serve(tls, CountingAnswer()) as server, Relay(server) as relay:
        link = join(tls, relay, reconnect_timeout=0.4)
        relay.close()
        began_at = time.monotonic()
        with pytest.raises(ServerUnreachableError, match="resume from a checkpoint"):
            link.exchange(b"a")
        assert 0.2 < time.monotonic() - began_at < 5
        link.close()


def test_out_of_order_messages_are_rejected_with_reason():
    executor = ExactlyOnceExecutor("north")
    for number in range(3):
        executor.execute(number, f"t{number}", lambda: Outcome("answer"))
    for number, reason in ((1, "the answer is no longer stored"), (4, "a message was lost")):
        with pytest.raises(
            RequestRejectedError, match=f"Message {number} of 'north' arrived, but message 3 is expected: {reason}"
        ) as error:
            executor.is_new(number, f"t{number}")
        assert error.value.code == "OUT_OF_RANGE"
    with pytest.raises(RequestRejectedError, match="Two different messages of 'north' have the number 2"):
        executor.is_new(2, "another")
    assert executor.is_new(3, "t3") and not executor.is_new(2, "t2")


def test_second_message_is_rejected_while_first_is_processed():
    executor, release = ExactlyOnceExecutor("north"), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(executor.execute, 0, "t0", lambda: Outcome("answer", str(release.wait(10)).encode()))
        wait_until(lambda: not executor.is_new(0, "t0"))
        with pytest.raises(RequestRejectedError, match="sent out of order"):
            executor.is_new(1, "t1")
        again = pool.submit(executor.execute, 0, "t0", lambda: Outcome("failed"))
        # The client of this delivery no longer waits.
        assert executor.wait_for_outcome(0, "t0", lambda: False) is None
        release.set()
        assert first.result(10) is again.result(10) and first.result().blob == b"True"


def raw_exchange(tls: Path, address: str, client_id: str, header: MessageHeader, *chunks: bytes) -> bytes:
    """Send a message without the checks of `GrpcLink`, and return the answer."""
    certificate = tls / "clients" / f"{client_id}.pem"
    credentials = grpc.ssl_channel_credentials(
        (tls / "ca.pem").read_bytes(), certificate.with_suffix(".key").read_bytes(), certificate.read_bytes()
    )
    with grpc.secure_channel(address, credentials) as channel:
        call = channel.stream_stream("/hf_federated.Sessions/Exchange")
        return b"".join(call(iter(chunks), timeout=10, metadata=((HEADER_KEY, header.to_json()),)))


@pytest.mark.parametrize(
    ("changes", "chunks", "code", "text"),
    [
        ({"number": 1}, [b"abc"], "OUT_OF_RANGE", "Message 1 of 'north' arrived, but message 0 is expected"),
        ({"session": "other"}, [b"abc"], "FAILED_PRECONDITION", "does not know this session"),
        ({}, [b"ab"], "INVALID_ARGUMENT", "a message of 3 bytes, but 2 bytes arrived"),
        ({}, [b"ab", b"cd"], "INVALID_ARGUMENT", "a message of 3 bytes, but more bytes arrived"),
        ({"num_bytes": 101}, [b"abc"], "INVALID_ARGUMENT", "has 101 bytes, but the server accepts at most 100"),
        ({"num_bytes": -1}, [b"abc"], "INVALID_ARGUMENT", "num_bytes of MessageHeader is -1"),
        ({"num_bytes": "3"}, [b"abc"], "INVALID_ARGUMENT", "has the fields"),
    ],
)
def test_message_that_contradicts_its_header_is_rejected(tls, changes, chunks, code, text):
    answer = CountingAnswer()
    with serve(tls, answer, max_message_bytes=100) as server, join(tls, server) as link:
        header = MessageHeader(**{"session": link._session_id, "number": 0, "token": "t", "num_bytes": 3, **changes})
        with pytest.raises(grpc.RpcError) as error:
            raw_exchange(tls, server.address, "north", header, *chunks)
        assert error.value.code().name == code and text in error.value.details()
        assert not answer.processed
        assert link.exchange(b"a") == b"1: a"


def test_session_of_another_client_is_rejected(tls):
    answer = CountingAnswer()
    with serve(tls, answer) as server, join(tls, server) as link:
        header = MessageHeader(link._session_id, 0, "t", 3)
        with pytest.raises(grpc.RpcError) as error:
            raw_exchange(tls, server.address, "south", header, b"abc")
        assert error.value.code().name == "PERMISSION_DENIED"
        assert not answer.processed


def test_clients_beyond_max_exchanges_try_again_until_a_slot_is_free(tls):
    active_clients, num_active = [], []

    def answer(client_id: str, message: bytes) -> bytes:
        active_clients.append(client_id)
        num_active.append(len(active_clients))
        time.sleep(0.05)
        active_clients.remove(client_id)
        return message

    def steps(client_id: str) -> bytes:
        with join(tls, server, client_id) as link:
            return b"".join(link.exchange(b"x") for _ in range(3))

    with serve(tls, answer, max_exchanges=1) as server, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(steps, CLIENTS)) == [b"xxx"] * 3
    assert max(num_active) == 1 and len(num_active) == 9


def test_error_when_no_slot_is_free_within_answer_timeout(tls):
    started, release = threading.Event(), threading.Event()

    def answer(client_id: str, message: bytes) -> bytes:
        started.set()
        release.wait(10)
        return message

    with serve(tls, answer, max_exchanges=1) as server, ThreadPoolExecutor(1) as pool:
        with join(tls, server) as north, join(tls, server, "south", answer_timeout=0.4) as south:
            first = pool.submit(north.exchange, b"1")
            assert started.wait(10)
            with pytest.raises(AnswerTimeoutError, match="had no free slot for message 0"):
                south.exchange(bytes(1 << 23))
            release.set()
            assert first.result(10) == b"1"


def test_message_of_forked_process_is_detected(tls):
    answer = CountingAnswer()
    with serve(tls, answer) as server, join(tls, server) as link:
        header = MessageHeader(link._session_id, 0, "token of the fork", 1)
        raw_exchange(tls, server.address, "north", header, b"a")
        with pytest.raises(LinkError, match="Two different messages of 'north' have the number 0"):
            link.exchange(b"b")
    assert answer.processed == [b"a"]
