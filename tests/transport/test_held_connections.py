"""A middlebox that holds a connection at any byte costs at most `reconnect_timeout`, and changes no answer."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from loopback import SESSION_CONFIG, CountingAnswer, Relay, certificates, join, serve, wait_until

from hf_federated.transport import (
    GrpcConnection,
    GrpcTransport,
    ServerUnreachableError,
    TlsCredentials,
    grpc_transport,
)
from hf_federated.transport.connection import create_channel


RECONNECT_SECONDS = 3.0
# Up to about 3 kB travel in each direction before the client's first message.
POSITIONS = [0, 1, 300, 1000, 2000, 2500, 3000, 3500, 4000, 6000]
FAST = [0, 2000, 6000]


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize(
    "position",
    [position if position in FAST else pytest.param(position, marks=pytest.mark.slow) for position in POSITIONS],
)
def test_held_connection_is_replaced(tls, position):
    answer = CountingAnswer()
    with serve(tls, answer) as server, Relay(server) as relay:
        relay.hold_after = position
        started = time.monotonic()
        with join(tls, relay, connect_timeout=60.0, reconnect_timeout=RECONNECT_SECONDS) as link:
            answers = [link.exchange(bytes([number]) * 1000) for number in range(4)]
        assert time.monotonic() - started < RECONNECT_SECONDS
        assert relay.num_silenced == 1 and len(relay.connections) > 1
    assert answers == [f"{number + 1}: ".encode() + bytes([number]) * 1000 for number in range(4)]


def test_error_names_the_attempts_and_a_firewall(tls):
    with serve(tls, CountingAnswer()) as server, Relay(server) as relay:
        relay.num_silenced = 100
        with pytest.raises(ServerUnreachableError, match=r"in \d+ attempts.*no firewall.*gRPC status"):
            join(tls, relay, connect_timeout=3.0, reconnect_timeout=RECONNECT_SECONDS)
        assert len(relay.connections) > 1


def test_error_of_a_session_names_address_attempts_seconds_and_the_last_reason(tls):
    with serve(tls, CountingAnswer()) as server, Relay(server) as relay:
        link = join(tls, relay, reconnect_timeout=0.6)
        relay.num_silenced = 100
        text = (
            rf"server at {relay.address} was not active for reconnect_timeout=0.6 s: \d+ attempts in [\d.]+ s failed, "
            r"over \d+ connections. gRPC status: \w+"
        )
        with pytest.raises(ServerUnreachableError, match=text):
            link.exchange(b"1")
        link.close()


NUM_REQUESTS = 5


@dataclass
class Run:
    """
    The bytes of a run, and what it took.

    Args:
        requests (`list[bytes]`): What the client received.
        replies (`list[bytes]`): What the server received.
        seconds (`float`): Seconds from the first connection until the client has left.
        server_seconds (`float`): Seconds until the server has stopped.
        num_bytes (`tuple[int, int]`): Bytes to the server and to the client before the answer that ends the run.
        relay (`Relay`): The relay between them.
    """

    requests: list[bytes]
    replies: list[bytes]
    seconds: float
    server_seconds: float
    num_bytes: tuple[int, int]
    relay: Relay


def run(tls: Path, **hold: Any) -> Run:
    """Exchange a few requests and replies over a relay, until the run ends on both sides."""
    transport = GrpcTransport("127.0.0.1:0", str(tls), heartbeat_timeout=2 * RECONNECT_SECONDS)
    transport.start(["north"], SESSION_CONFIG)
    requests: list[bytes] = []
    ends: list[tuple[str | None, float]] = []

    def take_part() -> None:
        options: dict[str, Any] = {"connect_timeout": 60.0, "reconnect_timeout": RECONNECT_SECONDS}
        with GrpcConnection(relay.address, str(tls), "north", SESSION_CONFIG, b"north", **options) as connection:
            reply = None
            while (request := connection.receive(reply)) is not None:
                requests.append(bytes(request))
                reply = bytes(request)[::-1]
        ends.append((connection.end, time.monotonic()))

    with Relay(transport) as relay:
        for name, value in hold.items():
            setattr(relay, name, value)
        started = time.monotonic()
        client = threading.Thread(target=take_part, daemon=True)
        client.start()
        replies: list[bytes] = []
        for number in range(NUM_REQUESTS):
            transport.send("north", lambda number=number: bytes([number, 1]) * 10_000)
            while len(replies) == number:
                event = transport.receive(60)
                replies += [bytes(event.blob)] if event.kind == "reply" else []
        num_bytes = relay.connections[0], relay.received[0]
        transport.stop()
        stopped = time.monotonic()
        client.join(60)
        ((reason, ended),) = ends
        assert reason == ""
        return Run(requests, replies, ended - started, stopped - started, num_bytes, relay)


@pytest.fixture(scope="module")
def undisturbed(tls) -> Run:
    return run(tls)


@pytest.mark.parametrize(
    "to_server", [pytest.param(True, marks=pytest.mark.slow), False], ids=["to the server", "to the client"]
)
@pytest.mark.parametrize(
    "share",
    [share if share == 1.0 else pytest.param(share, marks=pytest.mark.slow) for share in (0.0, 0.2, 0.4, 0.7, 1.0)],
)
def test_run_with_a_held_connection_ends_in_the_same_bytes(tls, undisturbed, monkeypatch, share, to_server):
    """The last positions are in the answer that ends the run, and in the last message of the client."""
    monkeypatch.setattr(grpc_transport, "_FAREWELL_SECONDS", 0.1)
    num_bytes = undisturbed.num_bytes[0] + 150 if to_server else undisturbed.num_bytes[1] + 30
    found = run(tls, hold_after=int(share * num_bytes), holds_to_server=to_server)
    assert found.relay.num_silenced == 1
    assert (found.requests, found.replies) == (undisturbed.requests, undisturbed.replies)
    assert found.seconds - undisturbed.seconds < RECONNECT_SECONDS
    # gRPC waits a second for the call on the connection that is held.
    assert found.server_seconds - undisturbed.server_seconds < RECONNECT_SECONDS + 1


@pytest.mark.slow
@pytest.mark.parametrize("is_held", [True, False])
def test_pings_are_permitted_and_end_a_connection_that_is_held(tls, is_held):
    """The call is silent, so gRPC sends pings only."""
    released = threading.Event()

    def requests():
        released.wait(20)
        yield from ()

    with serve(tls, CountingAnswer()) as server, Relay(server) as relay:
        channel = create_channel(grpc, relay.address, TlsCredentials.of_client(tls, "north"), 1.5)
        call = channel.stream_stream("/hf_federated.Sessions/Heartbeat")(requests(), timeout=7)
        grpc.channel_ready_future(channel).result(5)
        num_bytes = relay.received[0]
        wait_until(lambda: relay.received[0] > num_bytes)
        relay.num_silenced = int(is_held)
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as error:
            next(call)
        assert (time.monotonic() - started < 2.5) == is_held
        assert error.value.code().name == ("UNAVAILABLE" if is_held else "DEADLINE_EXCEEDED")
        released.set()
        channel.close()
