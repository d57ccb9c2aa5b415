"""Messages whose answer is lost are carried out once, and room for messages is bounded."""

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


class Answers:
    """Answers every message with how many came before it; may break the connection or wait meanwhile."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.meanwhile = lambda message: None

    def __call__(self, client_id: str, message: bytes) -> bytes:
        self.seen.append(message)
        self.meanwhile(message)
        return f"{len(self.seen)}: ".encode() + message


def test_a_message_whose_answer_is_lost_is_carried_out_once(tls):
    answers = Answers()
    with serve(tls, answers) as server, Relay(server) as relay, join(tls, relay) as link:
        answers.meanwhile = lambda message: relay.cut() if message == b"b" else None
        assert [link.exchange(own) for own in (b"a", b"b", b"c")] == [b"1: a", b"2: b", b"3: c"]
        assert answers.seen == [b"a", b"b", b"c"] and len(relay.connections) == 2


def test_an_answer_cut_in_the_middle_comes_again_whole(tls):
    content = bytes(range(256)) * (1 << 15)
    with serve(tls, lambda _, message: content) as server, Relay(server) as relay:
        relay.cut_after = 3 << 20
        with join(tls, relay) as link:
            assert link.exchange(b"a") == content
        assert len(relay.connections) == 2


def test_a_message_cut_in_the_middle_is_carried_out_once(tls):
    answers, content = Answers(), bytes(range(256)) * (1 << 15)
    with serve(tls, answers, max_exchanges=1) as server, Relay(server) as relay:
        relay.cut_after = 3 << 20
        with join(tls, relay) as link:
            assert link.exchange(content) == b"1: " + content
        assert answers.seen == [content] and len(relay.connections) >= 2


def comes_again(relay: Relay, times: int) -> Callable[[], bool]:
    """Whether a message is on its way for another time, over another connection."""
    return lambda: len(relay.connections) > times and relay.connections[-1] > 1 << 15


def test_a_message_that_comes_again_while_it_is_carried_out_is_waited_for(tls):
    answers, started, release = Answers(), threading.Event(), threading.Event()
    answers.meanwhile = lambda message: started.set() or release.wait(10)
    content = bytes(1 << 17)
    with serve(tls, answers) as server, Relay(server) as relay, join(tls, relay) as link:
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(link.exchange, content)
            assert started.wait(10)
            for repetitions in (1, 2):
                relay.cut()
                wait_until(comes_again(relay, repetitions))
            assert not answered.done()
            release.set()
            assert answered.result(10) == b"1: " + content
    assert answers.seen == [content]


def test_an_error_whose_telling_is_lost_is_told_again_and_not_made_again(tls):
    answers = Answers()

    def refuse(message: bytes) -> None:
        relay.cut()
        raise ValueError(f"refused {len(answers.seen)}")

    answers.meanwhile = refuse
    with serve(tls, answers) as server, Relay(server) as relay, join(tls, relay) as link:
        with pytest.raises(ValueError, match="refused 1"):
            link.exchange(b"a")
        assert answers.seen == [b"a"]


def test_a_connection_that_stays_broken_ends_the_link_in_time(tls):
    with serve(tls, Answers()) as server, Relay(server) as relay:
        link = join(tls, relay, reconnect_timeout=0.4)
        relay.close()
        began_at = time.monotonic()
        with pytest.raises(ServerUnreachableError, match="resume from a checkpoint"):
            link.exchange(b"a")
        assert 0.2 < time.monotonic() - began_at < 5
        link.close()


def test_messages_out_of_order_are_refused_by_name():
    once = ExactlyOnceExecutor("north")
    for number in range(3):
        once.carry_out(number, f"t{number}", lambda: Outcome("answer"))
    for number, text in ((1, "its answer is not kept"), (4, "one was lost")):
        with pytest.raises(
            RequestRejectedError, match=f"Message {number} of 'north' came, and 3 is the next: {text}"
        ) as error:
            once.is_new(number, f"t{number}")
        assert error.value.code == "OUT_OF_RANGE"
    with pytest.raises(RequestRejectedError, match="Two different messages of 'north' came as number 2"):
        once.is_new(2, "another")
    assert once.is_new(3, "t3") and not once.is_new(2, "t2")


def test_a_second_message_is_refused_while_the_first_is_carried_out():
    once, release = ExactlyOnceExecutor("north"), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once.carry_out, 0, "t0", lambda: Outcome("answer", str(release.wait(10)).encode()))
        wait_until(lambda: not once.is_new(0, "t0"))
        with pytest.raises(RequestRejectedError, match="sent before its turn"):
            once.is_new(1, "t1")
        again = pool.submit(once.carry_out, 0, "t0", lambda: Outcome("failed"))
        # Nobody waits for this one.
        assert once.wait(0, "t0", lambda: False) is None
        release.set()
        assert first.result(10) is again.result(10) and first.result().blob == b"True"


def raw_exchange(tls: Path, address: str, client_id: str, header: MessageHeader, *pieces: bytes) -> bytes:
    """What a client that keeps to nothing gets for a message."""
    certificate = tls / "clients" / f"{client_id}.pem"
    credentials = grpc.ssl_channel_credentials(
        (tls / "ca.pem").read_bytes(), certificate.with_suffix(".key").read_bytes(), certificate.read_bytes()
    )
    with grpc.secure_channel(address, credentials) as channel:
        call = channel.stream_stream("/hf_federated.Split/Exchange")
        return b"".join(call(iter(pieces), timeout=10, metadata=((HEADER_KEY, header.to_text()),)))


@pytest.mark.parametrize(
    ("changes", "pieces", "code", "text"),
    [
        ({"number": 1}, [b"abc"], "OUT_OF_RANGE", "Message 1 of 'north' came, and 0 is the next"),
        ({"session": "other"}, [b"abc"], "FAILED_PRECONDITION", "does not know this session"),
        ({}, [b"ab"], "INVALID_ARGUMENT", "3 bytes was announced, and 2 came"),
        ({}, [b"ab", b"cd"], "INVALID_ARGUMENT", "3 bytes was announced, and more came"),
        ({"num_bytes": 101}, [b"abc"], "INVALID_ARGUMENT", "101 bytes came; the server takes at most 100"),
        ({"num_bytes": -1}, [b"abc"], "INVALID_ARGUMENT", "below zero"),
        ({"num_bytes": "3"}, [b"abc"], "INVALID_ARGUMENT", "has the fields"),
    ],
)
def test_what_is_not_as_announced_is_refused_and_not_carried_out(tls, changes, pieces, code, text):
    answers = Answers()
    with serve(tls, answers, max_message_bytes=100) as server, join(tls, server) as link:
        header = MessageHeader(**{"session": link._session, "number": 0, "token": "t", "num_bytes": 3, **changes})
        with pytest.raises(grpc.RpcError) as error:
            raw_exchange(tls, server.address, "north", header, *pieces)
        assert error.value.code().name == code and text in error.value.details()
        assert not answers.seen
        assert link.exchange(b"a") == b"1: a"


def test_another_clients_session_is_of_no_use(tls):
    answers = Answers()
    with serve(tls, answers) as server, join(tls, server) as link:
        header = MessageHeader(link._session, 0, "t", 3)
        with pytest.raises(grpc.RpcError) as error:
            raw_exchange(tls, server.address, "south", header, b"abc")
        assert error.value.code().name == "PERMISSION_DENIED"
        assert not answers.seen


def test_clients_beyond_the_room_come_again_until_there_is_some(tls):
    under_way, most = [], []

    def answer(client_id: str, message: bytes) -> bytes:
        under_way.append(client_id)
        most.append(len(under_way))
        time.sleep(0.05)
        under_way.remove(client_id)
        return message

    def steps(client_id: str) -> bytes:
        with join(tls, server, client_id) as link:
            return b"".join(link.exchange(b"x") for _ in range(3))

    with serve(tls, answer, max_exchanges=1) as server, ThreadPoolExecutor(3) as pool:
        assert list(pool.map(steps, CLIENTS)) == [b"xxx"] * 3
    assert max(most) == 1 and len(most) == 9


def test_a_client_for_whom_there_is_no_room_in_time_is_told_so(tls):
    started, release = threading.Event(), threading.Event()

    def answer(client_id: str, message: bytes) -> bytes:
        started.set()
        release.wait(10)
        return message

    with serve(tls, answer, max_exchanges=1) as server, ThreadPoolExecutor(1) as pool:
        with join(tls, server) as north, join(tls, server, "south", answer_timeout=0.4) as south:
            first = pool.submit(north.exchange, b"1")
            assert started.wait(10)
            with pytest.raises(AnswerTimeoutError, match="had no room for it"):
                south.exchange(bytes(1 << 23))
            release.set()
            assert first.result(10) == b"1"


def test_a_fork_of_a_links_process_is_found_out(tls):
    answers = Answers()
    with serve(tls, answers) as server, join(tls, server) as link:
        header = MessageHeader(link._session, 0, "drawn by the fork", 1)
        raw_exchange(tls, server.address, "north", header, b"a")
        with pytest.raises(LinkError, match="Two different messages of 'north' came as number 0"):
            link.exchange(b"b")
    assert answers.seen == [b"a"]
