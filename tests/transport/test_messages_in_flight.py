"""Several messages of a client in flight: their order, their memory, and the end of a server or a link."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from loopback import CountingAnswer, Relay, certificates, join, raw_exchange, serve, wait_until

from hf_federated.transport import LinkError, ServerUnreachableError, attempts
from hf_federated.transport.exactly_once import ExactlyOnceExecutor
from hf_federated.transport.protocol import MAX_MESSAGES_IN_FLIGHT, MessageHeader
from hf_federated.transport.read_gate import ReadGate
from hf_federated.transport.session_registry import TransportSession


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def arrived(monkeypatch) -> list[int]:
    """The numbers of the messages that have arrived at the server as a whole, in order of arrival."""
    numbers: list[int] = []
    execute = ExactlyOnceExecutor.execute

    def execute_and_record(executor, header, call, is_open):
        numbers.append(header.number)
        return execute(executor, header, call, is_open)

    monkeypatch.setattr(ExactlyOnceExecutor, "execute", execute_and_record)
    return numbers


def test_messages_that_wait_when_the_server_closes_are_not_processed(tls, monkeypatch, arrived):
    processed, outcomes, started, release = [], [], threading.Event(), threading.Event()
    execute = ExactlyOnceExecutor.execute
    monkeypatch.setattr(ExactlyOnceExecutor, "execute", lambda *args: outcomes.append(execute(*args)) or outcomes[-1])

    def answer(client_id: str, message: bytes) -> bytes:
        processed.append(bytes(message))
        started.set()
        release.wait(10)
        return b""

    with serve(tls, answer) as server, join(tls, server, reconnect_timeout=0.5) as link:
        answers = [link.submit(b"%d" % number) for number in range(4)]
        assert started.wait(10)
        wait_until(lambda: len(arrived) == 4)
        server.close(grace=0.1)
        # The calls that waited have ended, so the threads of the server do not keep the process alive.
        wait_until(lambda: outcomes == [None] * 3)
        release.set()
        for item in answers:
            with pytest.raises(LinkError):
                item.result(10)
    assert processed == [b"0"]


def test_an_early_message_reserves_no_slot(tls):
    with serve(tls, CountingAnswer(), max_exchanges=1) as server, join(tls, server, "south") as south:
        with join(tls, server) as north, ThreadPoolExecutor(1) as pool:
            # The message before never arrives.
            early = pool.submit(
                raw_exchange, tls, server.address, "north", MessageHeader(north.session_id, 1, "a1", 1, 0), b"a"
            )
            time.sleep(0.2)
            assert south.exchange(b"message") == b"1: message"
            assert not early.done()
            north.close()
            with pytest.raises(grpc.RpcError):
                early.result(10)


def test_a_read_gate_is_entered_by_one_message_of_a_client_at_a_time(tls):
    gate, inside, release = ReadGate(min_bytes=10), [], threading.Event()
    enter = gate.enter
    gate.enter = lambda client_id, num_bytes: (inside.append(num_bytes), enter(client_id, num_bytes))

    def answer(client_id: str, message: bytes) -> bytes:
        release.wait(10)
        gate.leave(client_id)
        return b""

    with serve(tls, answer, read_gate=gate) as server, join(tls, server) as link:
        answers = [link.submit(bytes(10 + number)) for number in range(3)]
        wait_until(lambda: inside)
        time.sleep(0.1)
        assert inside == [10]
        release.set()
        for item in answers:
            item.result(10)
        assert inside == [10, 11, 12]


def test_messages_in_flight_are_answered_in_order_and_once(tls):
    answer, release = CountingAnswer(), threading.Event()
    answer.action = lambda message: release.wait(10)
    contents = [bytes([number]) * (1 << 20) for number in range(MAX_MESSAGES_IN_FLIGHT)]
    with serve(tls, answer) as server, Relay(server) as relay, join(tls, relay) as link:
        answers = [link.submit(content) for content in contents]
        wait_until(lambda: len(answer.processed) == 1)
        with ThreadPoolExecutor(1) as pool:
            further = pool.submit(link.submit, b"further")
            time.sleep(0.1)
            # The window is full.
            assert not further.done()
            for _ in range(3):
                relay.cut()
                time.sleep(0.05)
            release.set()
            assert [item.result(20) for item in answers] == [
                f"{number + 1}: ".encode() + content for number, content in enumerate(contents)
            ]
            assert further.result(10).result(10) == b"9: further"
        assert link.exchange(b"last") == b"10: last"
    assert answer.processed == [*contents, b"further", b"last"]


def test_next_message_arrives_while_the_server_processes_the_previous_one(tls, arrived):
    processing, release = threading.Event(), threading.Event()

    def answer(client_id: str, message: bytes) -> bytes:
        processing.set()
        release.wait(10)
        return bytes(message[:1])

    with serve(tls, answer) as server, join(tls, server) as link:
        first = link.submit(b"a" * (1 << 21))
        assert processing.wait(10)
        second = link.submit(b"b" * (1 << 21))
        # The second message is in memory although the first has no answer.
        wait_until(lambda: 1 in arrived)
        assert not first.done() and not second.done()
        release.set()
        assert (first.result(10), second.result(10)) == (b"a", b"b")


def test_each_message_has_the_whole_bandwidth(tls, monkeypatch):
    events = []
    split_into_chunks = attempts.split_into_chunks

    def spy(blob):
        events.append(f"start {blob[0]}")
        return record_end(blob)

    def record_end(blob):
        yield from split_into_chunks(blob)
        time.sleep(0.02)
        events.append(f"sent {blob[0]}")

    monkeypatch.setattr(attempts, "split_into_chunks", spy)
    with serve(tls, CountingAnswer()) as server, join(tls, server) as link:
        for answer in [link.submit(bytes([number]) * (1 << 18)) for number in range(4)]:
            answer.result(10)
    assert events == [f"{event} {number}" for number in range(4) for event in ("start", "sent")]


def test_a_repeated_message_cancels_only_its_own_previous_call():
    session, cancelled = TransportSession("north", "session", "token", None), []
    with (
        session.register_call(0, lambda: cancelled.append("first")),
        session.register_call(1, lambda: cancelled.append("second")),
    ):
        assert not cancelled
        with session.register_call(1, lambda: cancelled.append("second again")):
            assert cancelled == ["second"]
        session.close("The test is over.")
    assert cancelled == ["second", "first"]


def test_large_messages_are_read_one_after_the_other(tls, arrived):
    processing, release = threading.Event(), threading.Event()

    def answer(client_id: str, message: bytes) -> bytes:
        processing.set()
        release.wait(10)
        return bytes(message[:1])

    limit = 1 << 22
    with serve(tls, answer, max_message_bytes=limit) as server, join(tls, server) as link:
        sizes = [limit, limit // MAX_MESSAGES_IN_FLIGHT + 1, limit // MAX_MESSAGES_IN_FLIGHT]
        answers = [link.submit(b"%d" % number + bytes(size - 1)) for number, size in enumerate(sizes)]
        assert processing.wait(10)
        wait_until(lambda: 2 in arrived)
        # The second message is larger than an early message may be.
        assert 1 not in arrived
        release.set()
        assert [item.result(10) for item in answers] == [b"0", b"1", b"2"]


def test_rejected_message_in_flight_leaves_the_link_usable(tls):
    def refuse(client_id: str, message: bytes) -> bytes:
        if message == b"b":
            raise ValueError("b is refused")
        return bytes(message)

    with serve(tls, refuse) as server, join(tls, server) as link:
        answers = [link.submit(message) for message in (b"a", b"b", b"c")]
        assert answers[0].result(10) == b"a" and answers[2].result(10) == b"c"
        with pytest.raises(ValueError, match="b is refused"):
            answers[1].result(10)
        with pytest.raises(ValueError, match="accepts at most"):
            link.submit(bytes(link.max_message_bytes + 1))
        assert link.exchange(b"d") == b"d"


def test_lost_server_ends_all_messages_in_flight(tls):
    started, release = threading.Event(), threading.Event()
    with serve(tls, lambda *_: started.set() or b"%d" % release.wait(10)) as server, Relay(server) as relay:
        link = join(tls, relay, reconnect_timeout=0.4)
        answers = [link.submit(b"a") for _ in range(3)]
        assert started.wait(10)
        relay.close()
        for answer in answers:
            with pytest.raises(ServerUnreachableError, match="resume from a checkpoint"):
                answer.result(10)
        with pytest.raises(ServerUnreachableError):
            link.submit(b"b")
        release.set()
        link.close()


def test_answers_are_not_kept_and_cannot_be_cancelled(tls):
    with serve(tls, CountingAnswer()) as server, join(tls, server) as link:
        answer = link.submit(b"a")
        assert not answer.cancel() and answer.result(10) == b"1: a"
        reference = weakref.ref(answer)
        del answer
        # The thread of the message may hold it until it ends.
        wait_until(lambda: gc.collect() < 0 or reference() is None)


def test_closed_link_ends_messages_in_flight(tls):
    release = threading.Event()
    with serve(tls, lambda *_: b"%d" % release.wait(10)) as server:
        link = join(tls, server)
        answers = [link.submit(b"a") for _ in range(3)]
        link.close()
        for answer in answers:
            with pytest.raises(LinkError, match="The link was closed"):
                answer.result(10)
        release.set()
