"""Heartbeats: inactive clients and unresponsive servers are detected."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loopback import Relay, certificates, join, serve, wait_until

from hf_federated.transport import ClientRefusedError, LinkError, ServerUnreachableError, SessionLostError
from hf_federated.transport.session_registry import SessionRegistry


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


def echo(client_id: str, message: bytes) -> bytes:
    return message


def test_inactive_client_is_lost_and_other_clients_stay_connected(tls):
    lost: list[str] = []
    with serve(tls, echo, heartbeat_timeout=0.8, on_lost=lost.append) as server, Relay(server) as relay:
        with join(tls, server, "south") as south:
            north = join(tls, relay)
            assert server.is_alive("north") and server.is_alive("south")
            relay.accepting.clear()
            relay.cut()
            wait_until(lambda: lost)
            assert lost == ["north"]
            assert not server.is_alive("north") and server.seconds_since_heard("north") is None
            assert server.is_alive("south") and south.exchange(b"1") == b"1"
            relay.accepting.set()
            with pytest.raises(
                SessionLostError, match="ended the session of client 'north', which was inactive for .* s"
            ):
                north.exchange(b"1")
            north.close()
            # The client can connect again with a new session.
            with join(tls, relay) as again:
                assert again.exchange(b"1") == b"1" and server.is_alive("north")
    assert lost == ["north"]


def test_client_connects_again_after_its_loss_was_reported(tls):
    """Otherwise a late report would concern the new session."""
    order: list[str] = []
    release = threading.Event()

    def lost(client_id: str) -> None:
        order.append("loss begins")
        release.wait(10)
        order.append("loss ends")

    settings = {"heartbeat_timeout": 0.8, "on_lost": lost, "on_connected": lambda client_id: order.append("connected")}
    with serve(tls, echo, **settings) as server, Relay(server) as relay, join(tls, relay) as north:
        relay.accepting.clear()
        relay.cut()
        wait_until(lambda: "loss begins" in order)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(join, tls, server)
            time.sleep(0.3)
            release.set()
            with again.result(10) as link:
                assert link.exchange(b"1") == b"1"
        relay.accepting.set()
        north.close()
    assert order == ["connected", "loss begins", "loss ends", "connected"]


def test_heartbeats_keep_idle_client_connected(tls):
    with serve(tls, echo, heartbeat_timeout=0.6) as server, join(tls, server) as link:
        time.sleep(1.3)
        assert server.is_alive("north") and server.seconds_since_heard("north") < 0.6
        assert link.exchange(b"1") == b"1"


def test_slow_answers_do_not_block_heartbeats(tls):
    release = threading.Event()
    lost: list[str] = []

    def answer(client_id: str, message: bytes) -> bytes:
        release.wait(10)
        return message

    with serve(tls, answer, clients=["north", "south"], heartbeat_timeout=0.6, on_lost=lost.append) as server:
        with join(tls, server) as north, join(tls, server, "south") as south, ThreadPoolExecutor(2) as pool:
            steps = [pool.submit(link.exchange, b"1") for link in (north, south)]
            time.sleep(1.3)
            assert server.is_alive("north") and server.is_alive("south") and not lost
            release.set()
            assert [step.result(10) for step in steps] == [b"1", b"1"]


def test_message_of_lost_client_ends_before_message_of_its_next_link_starts(tls):
    order: list[bytes] = []
    started, release = threading.Event(), threading.Event()

    def answer(client_id: str, message: bytes) -> bytes:
        order.append(b"begin " + message)
        started.set()
        release.wait(10)
        order.append(b"end " + message)
        return message

    lost: list[str] = []
    with serve(tls, answer, heartbeat_timeout=0.4, on_lost=lost.append) as server, Relay(server) as relay:
        with ThreadPoolExecutor(2) as pool:
            north = join(tls, relay, reconnect_timeout=0.3)
            first = pool.submit(north.exchange, b"1")
            assert started.wait(10)
            relay.close()
            with pytest.raises(LinkError):
                first.result(10)
            wait_until(lambda: lost)
            with join(tls, server) as again:
                second = pool.submit(again.exchange, b"2")
                time.sleep(0.1)
                assert order == [b"begin 1"]
                release.set()
                assert second.result(10) == b"2"
            north.close()
    assert order == [b"begin 1", b"end 1", b"begin 2", b"end 2"]


def test_error_in_on_lost_does_not_stop_the_watcher(tls):
    lost: list[str] = []

    def on_lost(client_id: str) -> None:
        lost.append(client_id)
        raise RuntimeError("error in the callback")

    with serve(tls, echo, heartbeat_timeout=0.3, on_lost=on_lost) as server, Relay(server) as relay:
        links = [join(tls, relay, client_id) for client_id in ("north", "south")]
        relay.close()
        wait_until(lambda: len(lost) == 2)
        assert sorted(lost) == ["north", "south"]
    for link in links:
        link.close()


def test_on_connected_can_refuse_a_client(tls):
    def on_connected(client_id: str) -> None:
        raise ValueError("Training began without this client.")

    with serve(tls, echo, on_connected=on_connected) as server:
        with pytest.raises(ClientRefusedError, match=r"Training began without this client\."):
            join(tls, server)
        assert not server.is_alive("north")


def test_suspended_server_does_not_lose_clients():
    """After a suspended process continues, heartbeats that arrived in the meantime are not read yet."""
    lost: list[str] = []
    sessions = SessionRegistry(["north", "south"], 0.4, lost.append)
    sessions.open_session("north", "process", lambda: None)
    # While the session of another client opens, the watcher waits, as if the process was suspended.
    sessions.open_session("south", "process", lambda: sessions.start() or time.sleep(1))
    time.sleep(0.2)
    assert not lost
    wait_until(lambda: lost)
    sessions.close()


def test_unresponsive_server_with_open_connection_is_detected(tls):
    with serve(tls, echo) as server, Relay(server) as relay:
        link = join(tls, relay, reconnect_timeout=0.5)
        assert link.exchange(b"1") == b"1"
        relay.num_silenced = 1 << 20
        began_at = time.monotonic()
        with pytest.raises(ServerUnreachableError, match="was not active for reconnect_timeout"):
            link.exchange(b"2")
        assert 0.4 < time.monotonic() - began_at < 5
        link.close()


def test_silent_connection_is_replaced(tls):
    processed: list[bytes] = []

    def answer(client_id: str, message: bytes) -> bytes:
        processed.append(message)
        if message == b"2":
            relay.num_silenced = 1
        return message

    with serve(tls, answer) as server, Relay(server) as relay, join(tls, relay, reconnect_timeout=3) as link:
        assert [link.exchange(message) for message in (b"1", b"2", b"3")] == [b"1", b"2", b"3"]
        assert processed == [b"1", b"2", b"3"] and len(relay.connections) == 2


def test_slot_of_lost_client_becomes_free(tls):
    """The client is lost while it sends a message, whose remaining bytes never arrive."""
    lost: list[str] = []
    settings = {"heartbeat_timeout": 3.0, "max_exchanges": 1, "on_lost": lost.append}
    with serve(tls, echo, **settings) as server, Relay(server) as relay, ThreadPoolExecutor(1) as pool:
        # On a busy machine, a refusal takes a tenth of a second.
        with join(tls, server, "south") as south, join(tls, server, "Zoë/2", answer_timeout=0.5) as impatient:
            relay.silence_after = 2 << 20
            north = join(tls, relay)
            pending = pool.submit(north.exchange, bytes(8 << 20))
            wait_until(lambda: relay.num_silenced)
            with pytest.raises(TimeoutError, match="had no free slot for message 0"):
                impatient.exchange(b"1")
            impatient.close()
            assert south.exchange(b"1") == b"1"
            # The slot becomes free before the loss is reported, which another thread does.
            wait_until(lambda: lost)
            assert lost == ["north"]
            relay.close()
            north.close()
            with pytest.raises(LinkError):
                pending.result(10)
