"""Exactly-once processing of messages, and the limit of concurrent messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from loopback import CLIENTS, CountingAnswer, Relay, certificates, join, raw_exchange, serve, wait_until

from hf_federated.transport import AnswerTimeoutError, LinkError, ServerUnreachableError
from hf_federated.transport.errors import RequestRejectedError
from hf_federated.transport.exactly_once import ExactlyOnceExecutor
from hf_federated.transport.protocol import MAX_MESSAGES_IN_FLIGHT, MessageHeader, Outcome


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


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
        # A link ends when its next random pause would be too long, here after more than half of the timeout.
        link = join(tls, relay, reconnect_timeout=1.6)
        relay.close()
        began_at = time.monotonic()
        with pytest.raises(ServerUnreachableError, match="resume from a checkpoint"):
            link.exchange(b"a")
        assert 0.8 < time.monotonic() - began_at < 5
        link.close()


def header(number: int, oldest: int | None = None, token: str | None = None) -> MessageHeader:
    oldest = number if oldest is None else oldest
    return MessageHeader("session", number, f"t{number}" if token is None else token, 1, oldest)


def is_open() -> bool:
    return True


def test_out_of_order_messages_are_rejected_with_reason():
    executor = ExactlyOnceExecutor("north")
    for number in range(3):
        executor.execute(header(number), lambda: Outcome("answer"), is_open)
    last = 3 + MAX_MESSAGES_IN_FLIGHT
    for rejected, reason in (
        (header(1), "the answer is no longer stored"),
        # The client claims that it received an answer that does not exist.
        (header(4), "a message was lost"),
        (header(last, 3), "a message was lost"),
        (header(4, 5), "a message was lost"),
        (header(last, last), "a message was lost"),
    ):
        with pytest.raises(
            RequestRejectedError,
            match=f"Message {rejected.number} of 'north' arrived, but message 3 is expected: {reason}",
        ) as error:
            executor.is_new(rejected)
        assert error.value.code == "OUT_OF_RANGE"
    with pytest.raises(RequestRejectedError, match="Two different messages of 'north' have the number 2"):
        executor.is_new(header(2, token="another"))
    assert executor.is_new(header(3)) and executor.is_new(header(last - 1, 3)) and not executor.is_new(header(2))


def test_repeated_message_waits_while_first_delivery_is_processed():
    executor, release = ExactlyOnceExecutor("north"), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(
            executor.execute, header(0), lambda: Outcome("answer", str(release.wait(10)).encode()), is_open
        )
        wait_until(lambda: not executor.is_new(header(0)))
        with pytest.raises(RequestRejectedError, match="sent out of order"):
            executor.is_new(header(1))
        again = pool.submit(executor.execute, header(0), lambda: Outcome("failed"), is_open)
        # The client of this delivery no longer waits.
        assert executor.wait_for_outcome(header(0), lambda: False) is None
        release.set()
        assert first.result(10) is again.result(10) and first.result().blob == b"True"


def test_messages_that_arrive_early_are_processed_in_order():
    executor, processed = ExactlyOnceExecutor("north"), []
    numbers = list(range(MAX_MESSAGES_IN_FLIGHT))

    def execute(number: int) -> Outcome | None:
        return executor.execute(
            header(number, 0), lambda: processed.append(number) or Outcome("answer", str(number).encode()), is_open
        )

    with ThreadPoolExecutor(2 * len(numbers)) as pool:
        # Each message except for the first is delivered twice.
        early = [pool.submit(execute, number) for number in (*numbers[:0:-1], *numbers[1:])]
        wait_until(lambda: not any(executor.is_new(header(number, 0)) for number in numbers[1:]))
        assert not processed
        execute(0)
        assert [future.result(10).blob for future in early] == [
            str(n).encode() for n in (*numbers[:0:-1], *numbers[1:])
        ]
    assert processed == numbers
    # All answers are stored until the client confirms them.
    assert executor.wait_for_outcome(header(0), is_open).blob == b"0"
    executor.execute(header(len(numbers), 5), lambda: Outcome("answer"), is_open)
    with pytest.raises(RequestRejectedError, match="no longer stored"):
        executor.is_new(header(4, 0))
    assert executor.wait_for_outcome(header(5, 0), is_open).blob == b"5"


def test_early_message_is_not_processed_after_the_end_of_the_session():
    executor, processed, is_over = ExactlyOnceExecutor("north"), [], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(executor.execute, header(1, 0), lambda: processed.append(1), lambda: not is_over.is_set())
        wait_until(lambda: not executor.is_new(header(1, 0)))
        is_over.set()
        executor.notify_waiters()
        assert early.result(10) is None
    assert not processed


@pytest.mark.parametrize(
    ("changes", "chunks", "code", "text"),
    [
        (
            {"number": MAX_MESSAGES_IN_FLIGHT},
            [b"abc"],
            "OUT_OF_RANGE",
            "Message 8 of 'north' arrived, but message 0 is expected",
        ),
        ({"oldest": 1}, [b"abc"], "OUT_OF_RANGE", "Message 0 of 'north' arrived, but message 0 is expected"),
        ({"oldest": -1}, [b"abc"], "INVALID_ARGUMENT", "oldest of MessageHeader is -1"),
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
        fields = {"session": link.session_id, "number": 0, "token": "t", "num_bytes": 3, "oldest": 0, **changes}
        with pytest.raises(grpc.RpcError) as error:
            raw_exchange(tls, server.address, "north", MessageHeader(**fields), *chunks)
        assert error.value.code().name == code and text in error.value.details()
        assert not answer.processed
        assert link.exchange(b"a") == b"1: a"


def test_session_of_another_client_is_rejected(tls):
    answer = CountingAnswer()
    with serve(tls, answer) as server, join(tls, server) as link:
        header = MessageHeader(link.session_id, 0, "t", 3, 0)
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
        header = MessageHeader(link.session_id, 0, "token of the fork", 1, 0)
        raw_exchange(tls, server.address, "north", header, b"a")
        with pytest.raises(LinkError, match="Two different messages of 'north' have the number 0"):
            link.exchange(b"b")
    assert answer.processed == [b"a"]
