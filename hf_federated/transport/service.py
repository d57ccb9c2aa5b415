"""
The server's side of the protocol, independent of gRPC: connects clients and processes each message exactly once.

A message is processed in four steps:

1. Find the session of the message, and compare its client id with the certificate.
2. If the message was processed before, return the same outcome.
3. Reserve one of the `max_exchanges` slots before the bytes of the message are read.
4. Process the message. Only one message of a client is processed at a time, in the order of the numbers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from ..security.encrypted_link import EncryptedServer, ServerEndpoint
from ..security.encrypted_session import ServerSession
from .errors import RequestRejectedError
from .protocol import (
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGES_IN_FLIGHT,
    MAX_REQUEST_BYTES,
    VERSION,
    Blob,
    ConnectResponse,
    MessageHeader,
    Outcome,
    Pieces,
    join_chunks,
    parse_json_object,
    rejected_if_invalid,
)
from .read_gate import ReadGate
from .session_config import SessionConfig, format_differences
from .session_registry import SessionRegistry, TransportSession


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Deferred:
    """
    An answer that is not known yet. The message is dropped from memory before the answer is computed.

    Args:
        compute (`Callable[[], bytes | Pieces]`): Returns the answer. It may block.
    """

    compute: Callable[[], bytes | Pieces]


Answer = Callable[[str, Blob], bytes | Pieces | Deferred]


class PlainEndpoint:
    """
    The server's side of a link without message encryption. TLS still protects the link.

    Args:
        answer (`Callable[[Blob], bytes]`): Returns the answer to a message.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.exchange = answer

    def hello(self, hello: bytes) -> bytes:
        """
        Reject a handshake.

        Raises:
            ValueError: Always, because the endpoint does not encrypt messages.
        """
        raise ValueError(
            "This server does not encrypt messages. Pass encryption= to the server, or use the link without"
            " EncryptedLink."
        )

    def finish(self, finish: bytes) -> None:
        """
        Reject a handshake.

        Raises:
            ValueError: Always, because the endpoint does not encrypt messages.
        """
        self.hello(finish)


@dataclass(eq=False)
class Service:
    """
    The server's side of the protocol. For the arguments, see [`GrpcServer`].

    Example: see [`GrpcServer`].
    """

    answer: Answer
    sessions: SessionRegistry
    session_config: SessionConfig
    encryption: Callable[[str], ServerSession] | None
    max_message_bytes: int
    max_exchanges: int
    on_connected: Callable[[str], None] | None
    on_left: Callable[[str], None] | None
    read_gate: ReadGate | None

    def __post_init__(self) -> None:
        self._processing_locks = {client_id: threading.Lock() for client_id in self.sessions.clients}
        self._slots_lock = threading.Lock()
        # Number of messages of each client that are being read, wait, or are processed.
        self._num_active_messages: dict[str, int] = {}
        # Whether a message is read only after the previous message of the client was processed.
        self._reads_in_turn = self.read_gate is not None or self.max_exchanges < len(self.sessions.clients)

    def connect(self, request: bytes, owner: str | None) -> bytes:
        """
        Connect a client.

        Args:
            request (`bytes`): The request, as JSON.
            owner (`str`, *optional*): Client id in the certificate. `None` without TLS.

        Returns:
            `bytes`: The [`ConnectResponse`], as JSON.

        Raises:
            RequestRejectedError: If the client id differs from the certificate, is not known or already connected, or
                the session settings differ.
        """
        with rejected_if_invalid():
            fields = parse_json_object(request, "Connect", MAX_REQUEST_BYTES)
            if fields.get("version") != VERSION:
                raise RequestRejectedError(
                    "FAILED_PRECONDITION",
                    f"The server uses version {VERSION} of the protocol, but the client uses version "
                    f"{fields.get('version')!r}. Install the same version of hf-federated on both.",
                )
            client_id, process, config = fields.get("client_id"), fields.get("process"), fields.get("terms")
            if not isinstance(client_id, str) or not isinstance(process, str):
                raise ValueError("Connect must contain a client id and a process token.")
            self._check_owner(client_id, owner)
            if client_id not in self.sessions.clients:
                raise RequestRejectedError("PERMISSION_DENIED", f"The server does not know a client {client_id!r}.")
            differences = self.session_config.differences(config)
        if differences:
            reason = f"Client {client_id!r} and the server have different settings. {format_differences(differences)}."
            # Log the reason on the server too, because the other clients wait for this client.
            logger.warning(reason)
            raise RequestRejectedError("FAILED_PRECONDITION", reason)
        with self.sessions.reporting[client_id]:
            make_endpoint = functools.partial(self._make_endpoint, client_id)
            session, is_new = self.sessions.open_session(client_id, process, make_endpoint)
            if is_new and self.on_connected is not None:
                try:
                    self.on_connected(client_id)
                except Exception as error:
                    session.close("The server refused the client.")
                    if isinstance(error, ValueError):
                        raise RequestRejectedError("FAILED_PRECONDITION", str(error)) from None
                    raise
        timeout_ms = int(self.sessions.heartbeat_timeout * 1000)
        terms = self.session_config.to_dict()
        return ConnectResponse(session.session_id, timeout_ms, self.max_message_bytes, terms).to_json().encode("ascii")

    def heartbeat(self, request: bytes, owner: str | None) -> bytes:
        """
        Record a heartbeat.

        Args:
            request (`bytes`): The request, as JSON.
            owner (`str`, *optional*): Client id in the certificate. `None` without TLS.

        Raises:
            RequestRejectedError: If the session ended or belongs to another client.
        """
        self._session_of_request(request, owner).record_activity()
        return b"{}"

    def leave(self, request: bytes, owner: str | None) -> bytes:
        """
        End the session of a client that disconnects.

        Args:
            request (`bytes`): The request, as JSON.
            owner (`str`, *optional*): Client id in the certificate. `None` without TLS.

        Raises:
            RequestRejectedError: If the session ended or belongs to another client.
        """
        session = self._session_of_request(request, owner)
        with self.sessions.reporting[session.client_id]:
            if session.close(f"Client {session.client_id!r} left.") and self.on_left is not None:
                self.on_left(session.client_id)
        return b"{}"

    def session_of_message(
        self, header_text: str | bytes, owner: str | None
    ) -> tuple[TransportSession, MessageHeader]:
        """
        Parse the header of a message and find its session.

        Args:
            header_text (`str` or `bytes`): The [`MessageHeader`], as JSON.
            owner (`str`, *optional*): Client id in the certificate. `None` without TLS.

        Raises:
            RequestRejectedError: If the session ended or belongs to another client, or the message is too large.
        """
        with rejected_if_invalid():
            header = MessageHeader.from_json(header_text)
        session = self._find_session(header.session, owner)
        if header.num_bytes > self.max_message_bytes:
            raise RequestRejectedError(
                "INVALID_ARGUMENT",
                f"The message has {header.num_bytes} bytes, but the server accepts at most {self.max_message_bytes}.",
            )
        return session, header

    def exchange(
        self,
        kind: str,
        session: TransportSession,
        header: MessageHeader,
        chunks: Iterable[bytes],
        is_waiting: Callable[[], bool],
    ) -> Outcome | None:
        """
        Process a message, or return its outcome if it was processed before.

        Args:
            kind (`str`): `"exchange"`, `"hello"` or `"finish"`.
            session ([`TransportSession`]): Session of the message.
            header ([`MessageHeader`]): Header of the message.
            chunks (`Iterable[bytes]`): Chunks of the message. They are read only if the message is new.
            is_waiting (`Callable[[], bool]`): Whether the client still waits for the outcome.

        Returns:
            `Outcome`, *optional*: The outcome, or `None` if the client no longer waits.

        Raises:
            RequestRejectedError: If the message is out of order or differs from its header, is too large for its kind,
                or no slot is free.
        """
        if kind != "exchange" and header.num_bytes > MAX_HANDSHAKE_BYTES:
            raise RequestRejectedError(
                "INVALID_ARGUMENT",
                f"The {kind!r} message has {header.num_bytes} bytes, but a message of a handshake has at most "
                f"{MAX_HANDSHAKE_BYTES}.",
            )
        executor = session.executor

        def is_expected() -> bool:
            return is_waiting() and session.end_reason is None

        if not executor.is_new(header):
            outcome = executor.wait_for_outcome(header, is_expected)
            session.check_open()
            return outcome
        # The early messages of a client together are smaller than one message of the maximum size.
        if self._reads_in_turn or header.num_bytes > self.max_message_bytes // MAX_MESSAGES_IN_FLIGHT:
            executor.wait_for_turn(header, is_expected)
            if not is_expected():
                session.check_open()
                return None
        with self._reserve_slot(session.client_id):
            content = [self._read(session, header, chunks)]
            session.check_open()
            process = functools.partial(self._process, kind, session, content)
            outcome = executor.execute(header, process, lambda: session.end_reason is None)
            if outcome is None:
                session.check_open()
            return outcome

    def _read(self, session: TransportSession, header: MessageHeader, chunks: Iterable[bytes]) -> Blob:
        if self.read_gate is not None:
            self.read_gate.enter(session.client_id, header.num_bytes)
        try:
            with rejected_if_invalid():
                return join_chunks(chunks, header.num_bytes, session.record_activity)
        except BaseException:
            if self.read_gate is not None:
                self.read_gate.leave(session.client_id)
            raise

    def _process(self, kind: str, session: TransportSession, content: list[Blob]) -> Outcome:
        """Process a message, the only element of `content`. It is removed, so that its memory can be freed early."""

        def call() -> Blob | Pieces:
            # A message of the client's previous session may still be in progress.
            with self._processing_locks[session.client_id]:
                if session.end_reason is not None:
                    raise ValueError(session.end_reason)
                if kind == "exchange":
                    endpoint: Any = session.endpoint
                    answer = endpoint.exchange(content.pop())
                    # The message is no longer in memory.
                    return answer.compute() if isinstance(answer, Deferred) else answer
                if kind == "hello":
                    return session.endpoint.hello(bytes(content.pop()))
                session.endpoint.finish(bytes(content.pop()))
                return b""

        return Outcome.from_call(call, f"A message of client {session.client_id!r}")

    @contextlib.contextmanager
    def _reserve_slot(self, client_id: str) -> Iterator[None]:
        """
        Reserve a slot while a message of a client is read and processed. The messages of a client share one slot.

        Raises:
            RequestRejectedError: If no slot is free.
        """
        with self._slots_lock:
            if client_id not in self._num_active_messages and len(self._num_active_messages) >= self.max_exchanges:
                raise RequestRejectedError(
                    "RESOURCE_EXHAUSTED",
                    f"The server already processes messages of {self.max_exchanges} clients. Try again later.",
                )
            self._num_active_messages[client_id] = self._num_active_messages.get(client_id, 0) + 1
        try:
            yield
        finally:
            with self._slots_lock:
                self._num_active_messages[client_id] -= 1
                if not self._num_active_messages[client_id]:
                    del self._num_active_messages[client_id]

    def _make_endpoint(self, client_id: str) -> ServerEndpoint:
        # With encryption, the answer is bytes.
        answer: Any = functools.partial(self.answer, client_id)
        if self.encryption is None:
            return PlainEndpoint(answer)
        return EncryptedServer(self.encryption(client_id), answer)

    def _session_of_request(self, request: bytes, owner: str | None) -> TransportSession:
        with rejected_if_invalid():
            session_id = parse_json_object(request, "The request").get("session")
            if not isinstance(session_id, str):
                raise ValueError("The request does not contain a session id.")
        return self._find_session(session_id, owner)

    def _find_session(self, session_id: str, owner: str | None) -> TransportSession:
        session = self.sessions.find(session_id)
        self._check_owner(session.client_id, owner)
        session.record_activity()
        return session

    def _check_owner(self, client_id: str, owner: str | None) -> None:
        if owner is not None and owner != client_id:
            raise RequestRejectedError(
                "PERMISSION_DENIED",
                f"The certificate belongs to {owner!r}, but the request names client {client_id!r}.",
            )
