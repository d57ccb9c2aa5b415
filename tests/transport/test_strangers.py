"""Strangers at the port of a split server: they take no slot, no thread and no log from the clients."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from loopback import certificates, join, serve, wait_until
from strangers import KINDS, strangers

from hf_federated.transport import TlsCredentials
from hf_federated.transport.admission import Admission
from hf_federated.transport.errors import RequestRejectedError
from hf_federated.transport.server import CALLS_PER_CLIENT


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"), ["north", "south", "stranger"])


def open_call(tls: Path, address: str, name: str, method: str = "Exchange"):
    """A channel and a call with a certificate that never sends a message."""
    files = TlsCredentials.of_client(tls, name)
    credentials = grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)
    channel = grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)])
    closed = threading.Event()

    def messages():
        closed.wait()
        yield from ()

    return channel, channel.stream_stream(f"/hf_federated.Sessions/{method}")(messages(), timeout=20), closed


@pytest.mark.parametrize("method", ["Connect", "Heartbeat", "Exchange", "ExchangeSmall", "Hello"])
def test_unknown_name_is_refused_before_it_sends_a_message(tls, method):
    with serve(tls, lambda _, blob: blob, clients=["north"]) as server:
        channel, call, closed = open_call(tls, server.address, "stranger", method)
        with channel, pytest.raises(grpc.RpcError) as error:
            next(call)
        closed.set()
    assert error.value.code().name == "PERMISSION_DENIED"
    assert "does not know a client 'stranger'" in error.value.details()


def test_refused_name_is_logged_once(tls, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with serve(tls, lambda _, blob: blob, clients=["north"]) as server:
        for _ in range(3):
            channel, call, closed = open_call(tls, server.address, "stranger")
            with channel, pytest.raises(grpc.RpcError):
                next(call)
            closed.set()
    assert caplog.text.count("refused a call with a valid certificate of 'stranger'") == 1


def test_refused_names_are_logged_again_after_an_interval_and_share_an_entry_beyond_a_number(monkeypatch):
    entries: list[str] = []
    monkeypatch.setattr("hf_federated.transport.admission.logger.warning", entries.append)
    now = [0.0]
    monkeypatch.setattr("hf_federated.transport.admission.time.monotonic", lambda: now[0])
    admission = Admission(["north"], 1)

    def refuse(name: str) -> None:
        with pytest.raises(RequestRejectedError), admission.admit(name):
            pass

    for _ in range(5):
        refuse("south")
    now[0] = 601.0
    refuse("south")
    assert len(entries) == 2 and "It made 4 further calls" in entries[1]
    for number in range(200):
        refuse(f"name {number}")
    assert len(entries) == 2 + 100 and "further names" in entries[-1]
    refuse("x" * 5000 + "\n")
    assert max(map(len, entries)) < 250 and "\n" not in "".join(entries)


def test_client_cannot_hold_more_than_its_own_calls(tls):
    """The other clients get their answers although one client opens as many calls as it can."""
    with serve(tls, lambda _, blob: blob, clients=["north", "south"]) as server:
        calls = [open_call(tls, server.address, "south", "Heartbeat") for _ in range(CALLS_PER_CLIENT + 32)]
        with ThreadPoolExecutor(len(calls)) as pool:

            def code(call) -> str:
                try:
                    next(call)
                except grpc.RpcError as error:
                    return error.code().name
                return "OK"

            codes = [pool.submit(code, call) for _, call, _ in calls]
            wait_until(lambda: sum(result.done() for result in codes) == 32)
            with join(tls, server) as link:
                assert [link.exchange(b"%d" % number) for number in range(5)] == [b"%d" % n for n in range(5)]
            for _, call, closed in calls:
                closed.set()
                call.cancel()
            assert sorted(result.result(10) for result in codes).count("RESOURCE_EXHAUSTED") == 32
        for channel, _, _ in calls:
            channel.close()


def test_silent_call_of_a_client_ends_after_the_message_timeout(tls, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with serve(tls, lambda _, blob: blob, clients=["north"], message_timeout=0.3) as server:
        channel, call, closed = open_call(tls, server.address, "north", "Connect")
        started_at = time.monotonic()
        with channel, pytest.raises(grpc.RpcError) as error:
            next(call)
        closed.set()
        assert time.monotonic() - started_at < 5 and error.value.code().name == "CANCELLED"
        # Calls that only wait for an answer of the server do not end.
        with join(tls, server) as link:
            assert link.exchange(b"1") == b"1"
    assert "Client 'north' sent no message for 0.3 s" in caplog.text


def test_waiting_for_an_answer_does_not_count_as_silence(tls):
    def answer(_: str, blob: bytes) -> bytes:
        time.sleep(0.5)
        return blob

    with serve(tls, answer, clients=["north"], message_timeout=0.2) as server, join(tls, server) as link:
        assert link.exchange(b"1") == b"1"


def exchange_under_strangers(tls: Path, number: int, kinds: tuple[str, ...]) -> list[float]:
    """Seconds of the exchanges of two clients while strangers connect."""
    seconds: list[float] = []
    content = bytes(1 << 20)

    def work(client_id: str) -> None:
        with join(tls, server, client_id) as link:
            for _ in range(20):
                started_at = time.monotonic()
                assert link.exchange(content) == content
                seconds.append(time.monotonic() - started_at)

    with serve(tls, lambda _, blob: blob, clients=["north", "south"]) as server:
        with strangers(tls, server.address, number, kinds), ThreadPoolExecutor(2) as pool:
            list(pool.map(work, ["north", "south"]))
    return seconds


def test_clients_exchange_messages_while_strangers_connect(tls):
    """Twelve half-open calls took all slots of a server of two clients."""
    assert len(exchange_under_strangers(tls, 12, KINDS)) == 40


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids=[*KINDS, "all"])
def test_clients_exchange_messages_while_200_strangers_of_each_kind_connect(tls, kinds):
    seconds = sorted(exchange_under_strangers(tls, 200, kinds))
    assert len(seconds) == 40
    print(f"{kinds}: median {seconds[20]:.3f} s, longest {seconds[-1]:.3f} s")
