"""`GrpcTransport` and `GrpcConnection`: a federation over gRPC sessions with mutual TLS.

A client always sends first. Its first message is the announcement. Its other messages are a reply, or empty. The
answer of the server is the next request. If there is none, the server answers after `POLL_SECONDS` at the latest, and
the client asks again. A session delivers each message and each answer once, also over broken connections.

| message of the client | answer of the server |
|---|---|
| the announcement | `W` and what the client waits for |
| a reply, or empty | `Q` and a request, `W` and what the client waits for, or `E` and the reason of the end |

The server holds at most one large reply in memory: it reads the next one when the caller asks for the next event.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from .base import Connection, Event, Transport
from .client import GrpcLink
from .credentials import TlsCredentials, check_credentials
from .errors import AnswerTimeoutError, ServerUnreachableError, SessionLostError
from .event_queue import EventQueue
from .protocol import DEFAULT_MAX_MESSAGE_BYTES, Blob, JoinedPieces, Pieces
from .read_gate import ReadGate
from .server import GrpcServer
from .service import Deferred
from .session_config import SessionConfig


logger = logging.get_logger(__name__)

POLL_SECONDS = 20.0
_REQUEST, _WAIT, _END = b"Q", b"W", b"E"
# What a client without a request waits for.
_START, _OTHERS, _SERVER = b"S", b"O", b"N"
WAITING_TEXTS = {
    _START: "waits for the run to start: other clients have not joined yet",
    _OTHERS: "waits for the next round: other clients still work on their requests",
    _SERVER: "waits for the next round: the server has sent no request yet",
}
# Longest time of a message and its answer. It is long because a large message may wait for the messages of other
# clients on a slow link. Heartbeats detect a server that has ended.
_ANSWER_SECONDS = 6 * 3600.0
# Largest announcement. It has a number for each class, and a vocabulary has up to about 300,000 classes.
_MAX_ANNOUNCEMENT_BYTES = 8 << 20
# Seconds that the server waits for the clients that it hears to leave when the run has ended.
_FAREWELL_SECONDS = 10.0
# Seconds between two checks whether clients are heard.
_CHECK_SECONDS = 1.0


@dataclass
class _Client:
    """
    The server's state of a client.

    Args:
        changed (`threading.Condition`): Wakes the call of the client that waits for a request.
        is_connected (`bool`): Whether the client has joined.
        has_announced (`bool`): Whether the client has announced itself in this session.
        build (`Callable`, *optional*): Builds the open request.
        is_delivered (`bool`): Whether the open request was sent in this session.
    """

    changed: threading.Condition
    is_connected: bool = False
    has_announced: bool = False
    build: Callable[[], bytes | Pieces] | None = None
    is_delivered: bool = False


class GrpcTransport(Transport):
    """
    The transport of this library: gRPC sessions with mutual TLS ([`GrpcServer`]).

    Args:
        address (`str`, *optional*, defaults to `"0.0.0.0:50051"`):
            Address to listen on, as `host:port`. Port 0 selects a free port.
        certificates (`str`, *optional*):
            Folder with the certificates of the server, from `hf-federated certificates`. `None` requires
            `insecure=True`.
        insecure (`bool`, *optional*, defaults to `False`):
            Whether to use no TLS. Allowed on a loopback address only.
        heartbeat_timeout (`float`, *optional*, defaults to `60`):
            Seconds without a sign of a client after which the client is lost.
        max_message_bytes (`int`, *optional*, defaults to 1 GiB):
            Size of the largest message that a client may send.

    Attributes:
        address (`str`): The address of the server, with the selected port once the transport has started.

    Example: see [`~hf_federated.engines.NetworkEngine`].
    """

    def __init__(
        self,
        address: str = "0.0.0.0:50051",
        certificates: str | None = None,
        *,
        insecure: bool = False,
        heartbeat_timeout: float = 60.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self.address = address
        self._credentials = None if certificates is None else TlsCredentials.of_server(certificates)
        check_credentials(self._credentials, insecure, address)
        self._heartbeat_timeout = heartbeat_timeout
        self._create_server = functools.partial(
            GrpcServer, insecure=insecure, heartbeat_timeout=heartbeat_timeout, max_message_bytes=max_message_bytes
        )
        self._server: GrpcServer | None = None
        self._clients: dict[str, _Client] = {}
        # Protects the states of the clients. Wakes the end of the run, which waits for the clients to leave.
        self._changed = threading.Condition()
        self._end: str | None = None
        # Whether the run has started, so that a request was sent.
        self._has_sent = False
        self._events = EventQueue(ReadGate())

    def start(self, client_ids: Sequence[str], session_config: SessionConfig) -> None:
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # Each client has a condition with the same lock, because waking all calls for each request is slow.
        self._clients = {client_id: _Client(threading.Condition(lock)) for client_id in client_ids}
        self._end, self._events, self._has_sent = None, EventQueue(ReadGate()), False
        self._server = self._create_server(
            self._answer,
            self._credentials,
            client_ids,
            session_config,
            address=self.address,
            on_connected=self._on_connected,
            on_left=lambda client_id: self._disconnect(client_id, "left"),
            on_lost=lambda client_id: self._disconnect(client_id, "lost"),
            read_gate=self._events.gate,
        )
        self.address = self._server.address
        self._server.start()

    def send(self, client_id: str, build: Callable[[], bytes | Pieces]) -> None:
        with self._changed:
            client = self._clients[client_id]
            client.build, client.is_delivered, self._has_sent = build, False, True
            client.changed.notify_all()

    def withdraw(self, client_id: str) -> None:
        with self._changed:
            self._clients[client_id].build = None

    def receive(self, timeout: float | None) -> Event | None:
        return self._events.receive(timeout)

    def is_connected(self, client_id: str) -> bool:
        return self._clients[client_id].is_connected

    def seconds_since_heard(self, client_id: str) -> float | None:
        return None if self._server is None else self._server.seconds_since_heard(client_id)

    def expel(self, client_id: str, reason: str = "") -> None:
        self.withdraw(client_id)
        if self._server is not None:
            self._server.expel(client_id, reason)
        self._disconnect(client_id, "left")

    def stop(self, reason: str = "") -> None:
        if self._server is None:
            return
        with self._changed:
            self._end = reason
            for client in self._clients.values():
                client.changed.notify_all()
            self._wait_for_farewells()
        self._events.gate.close()
        self._server.close()
        self._server = None

    def _wait_for_farewells(self) -> None:
        """Wait until the clients leave. A client that is not heard may be replacing a connection that is held."""
        # A client sends four heartbeats in the timeout.
        interval, now = self._heartbeat_timeout / 4, time.monotonic()
        patience = max(_FAREWELL_SECONDS, 1.5 * interval)
        longest, deadline = now + self._heartbeat_timeout + patience, now + patience
        while now < min(deadline, longest):
            connected = [client_id for client_id, client in self._clients.items() if client.is_connected]
            if not connected:
                return
            if any((self.seconds_since_heard(name) or 0) > 1.2 * interval for name in connected):
                deadline = now + patience
            self._changed.wait(min(_CHECK_SECONDS, interval))
            now = time.monotonic()

    # ---- Threads of the server

    def _answer(self, client_id: str, blob: Blob) -> bytes | Deferred:
        client = self._clients[client_id]
        if not client.has_announced:
            self._events.gate.leave(client_id)
            if len(blob) > _MAX_ANNOUNCEMENT_BYTES:
                raise ValueError(
                    f"The announcement of client {client_id!r} has {len(blob)} bytes, but at most "
                    f"{_MAX_ANNOUNCEMENT_BYTES} bytes are allowed."
                )
            with self._changed:
                client.is_connected = client.has_announced = True
            self._events.put(Event("joined", client_id, blob))
            return self._wait()
        if blob:
            self._take_reply(client_id, client, blob)
        return Deferred(lambda: self._next_request(client))

    def _take_reply(self, client_id: str, client: _Client, reply: Blob) -> None:
        with self._changed:
            is_expected = client.build is not None and client.is_delivered
            if is_expected:
                client.build = None
        if is_expected:
            self._events.put(Event("reply", client_id, reply))
        else:
            self._events.gate.leave(client_id)
            logger.warning(f"Ignored a reply of client {client_id!r}: it came too late, or it was not asked for.")

    def _next_request(self, client: _Client) -> bytes | Pieces:
        def is_ready() -> bool:
            is_open = client.build is not None and not client.is_delivered
            return is_open or not client.is_connected or self._end is not None

        with self._changed:
            is_idle = not client.changed.wait_for(is_ready, POLL_SECONDS)
            if self._end is not None:
                return _END + self._end.encode()
            if is_idle or not client.is_connected or client.build is None:
                return self._wait()
            client.is_delivered, build = True, client.build
        return JoinedPieces(_REQUEST, build())

    def _wait(self) -> bytes:
        """Return the answer to a client that has no request."""
        with self._changed:
            clients = self._clients.values()
            if not self._has_sent and not all(client.is_connected for client in clients):
                return _WAIT + _START
            return _WAIT + (_OTHERS if any(client.build is not None for client in clients) else _SERVER)

    def _on_connected(self, client_id: str) -> None:
        with self._changed:
            # The client has lost what it had received before.
            self._clients[client_id].is_delivered = self._clients[client_id].has_announced = False

    def _disconnect(self, client_id: str, kind: Any) -> None:
        with self._changed:
            client = self._clients[client_id]
            was_connected, client.is_connected = client.is_connected, False
            client.changed.notify_all()
            self._changed.notify_all()
        if was_connected:
            self._events.put(Event(kind, client_id))


class GrpcConnection(Connection):
    """
    A client's connection to a [`GrpcTransport`].

    Args:
        address (`str`): Address of the server, as `host:port`.
        certificates (`str`, *optional*): Folder with the certificates of the client. `None` requires `insecure=True`.
        client_id (`str`): Id of the client.
        session_config ([`SessionConfig`]): Settings that the client must share with the server.
        announcement (`bytes`): What the client announces.
        insecure (`bool`, *optional*, defaults to `False`): Whether to use no TLS, on a loopback address only.
        connect_timeout (`float`, *optional*, defaults to `600`): Seconds to try to connect.
        reconnect_timeout (`float`, *optional*, defaults to `45`): Seconds without a sign of the server after which the
            connection ends.
        max_message_bytes (`int`, *optional*, defaults to 1 GiB): Size of the largest message that the server may send.

    Raises:
        ClientRefusedError: If the server refuses the client.
        ServerUnreachableError: If the server does not respond.
    """

    def __init__(
        self,
        address: str,
        certificates: str | None,
        client_id: str,
        session_config: SessionConfig,
        announcement: bytes,
        *,
        insecure: bool = False,
        connect_timeout: float = 600.0,
        reconnect_timeout: float = 45.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        credentials = None if certificates is None else TlsCredentials.of_client(certificates, client_id)
        # What the client has waited for. Each state is logged once.
        self._waited: set[bytes] = set()
        deadline = time.monotonic() + connect_timeout
        while True:
            self._link = GrpcLink(
                address,
                credentials,
                client_id,
                session_config,
                insecure=insecure,
                connect_timeout=max(deadline - time.monotonic(), 0.01),
                reconnect_timeout=reconnect_timeout,
                answer_timeout=_ANSWER_SECONDS,
                max_answer_bytes=max_message_bytes,
            )
            try:
                self._joined = bytes(self._link.exchange(announcement)[:2])
                return
            except (SessionLostError, ServerUnreachableError, AnswerTimeoutError):
                # The server stopped, or the network failed, after the client had connected.
                self._link.close()
                if time.monotonic() > deadline:
                    raise
            except BaseException:
                self._link.close()
                raise

    def receive(self, reply: bytes | None = None) -> Blob | None:
        message = b"" if reply is None else reply
        if self._joined[1:] == _START:
            self._log_waiting(_START)
        while True:
            answer = self._link.exchange(message)
            message = b""
            if answer[:1] == _WAIT:
                self._log_waiting(bytes(answer[1:2]))
            if answer[:1] == _REQUEST:
                return memoryview(answer)[1:]
            if answer[:1] == _END:
                self.end = bytes(answer[1:]).decode()
                self.close()  # The server waits for its clients to leave.
                return None

    def close(self) -> None:
        self._link.close()

    def _log_waiting(self, state: bytes) -> None:
        """Log what the client waits for, once for each state."""
        if state in WAITING_TEXTS and state not in self._waited:
            self._waited.add(state)
            name = self._link.client_id
            logger.warning(f"Client {name!r} {WAITING_TEXTS[state]}.", extra={"event": "waiting", "client": name})
