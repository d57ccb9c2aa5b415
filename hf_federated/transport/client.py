"""
`GrpcLink`: a client's link to a server over gRPC. The link replaces broken connections.

If a message gets no answer, the link sends the message again with the same number, and the server processes it once.
Several messages can be in flight, each in a call and a thread. They are sent one after the other, so that the server
processes one while the next one travels.

Other failures end the link with an error that names the reason. The client then does not know whether the server
processed the messages in flight, and must resume from a checkpoint with a new link.
"""

from __future__ import annotations

import collections
import functools
import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from transformers.utils import logging

from .credentials import TlsCredentials, check_credentials, require_grpc
from .errors import (
    AnswerTimeoutError,
    ClientRefusedError,
    LinkError,
    ServerFailedError,
    ServerUnreachableError,
    SessionLostError,
)
from .protocol import (
    CHUNK_BYTES,
    DEFAULT_MAX_MESSAGE_BYTES,
    HEADER_KEY,
    MAX_MESSAGES_IN_FLIGHT,
    SERVICE,
    VERSION,
    Blob,
    ConnectResponse,
    MessageHeader,
    Outcome,
    split_into_chunks,
)
from .session_config import SessionConfig


logger = logging.get_logger(__name__)

# Seconds between attempts.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
# Status codes of a failed connection, which do not depend on the message. INTERNAL means that a stream was reset.
_CONNECTION_ERRORS = frozenset({"CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN"})
_BUSY = "RESOURCE_EXHAUSTED"
# A message in flight of this size fits into the buffers of a connection. The next one is sent at once.
_SMALL_BYTES = 1 << 14
# If gRPC does not end a call this many seconds after the timeout of the call, gRPC will never end the call.
_GRACE = 2.0


class GrpcLink:
    """
    A client's link to a [`GrpcServer`].

    The constructor connects to the server. To encrypt messages in addition to TLS, wrap the link in an
    [`~hf_federated.security.encrypted_link.EncryptedLink`].

    Args:
        address (`str`):
            Address of the server, as `host:port`. The certificate of the server must contain the host.
        credentials ([`TlsCredentials`], *optional*):
            Credentials of the client. `None` requires `insecure=True`.
        client_id (`str`):
            Id of the client, as in the certificate.
        session_config ([`SessionConfig`]):
            Settings that the client must share with the server.
        insecure (`bool`, *optional*, defaults to `False`):
            Whether to use no TLS. Allowed on a loopback address only.
        connect_timeout (`float`, *optional*, defaults to `60`):
            Seconds to try to connect. The server may still be starting, or may not have ended a previous link of the
            client yet.
        reconnect_timeout (`float`, *optional*, defaults to `45`):
            Seconds without activity of the server after which the server counts as unreachable. Choose a smaller value
            than the server's `heartbeat_timeout`.
        answer_timeout (`float`, *optional*, defaults to `600`):
            Seconds to wait for an answer while the server is alive. The server may wait for other clients before it
            answers.
        max_answer_bytes (`int`, *optional*, defaults to 1 GiB):
            Size of the largest answer that the client accepts.

    Raises:
        ImportError: If `grpcio` (extra `network`) is not installed.
        ValueError: If an argument is not allowed.
        ServerUnreachableError: If the server does not respond or TLS fails. gRPC does not distinguish the two cases.
        ClientRefusedError: If the server refuses the client, or the settings of client and server differ. The error
            names the differing settings.

    Attributes:
        max_in_flight (`int`): Number of messages that can be in flight.

    Example: see [`GrpcServer`].
    """

    max_in_flight = MAX_MESSAGES_IN_FLIGHT

    def __init__(
        self,
        address: str,
        credentials: TlsCredentials | None,
        client_id: str,
        session_config: SessionConfig,
        *,
        insecure: bool = False,
        connect_timeout: float = 60.0,
        reconnect_timeout: float = 45.0,
        answer_timeout: float = 600.0,
        max_answer_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._grpc = require_grpc(type(self).__name__)
        check_credentials(credentials, insecure, address)
        timeouts = {"connect": connect_timeout, "reconnect": reconnect_timeout, "answer": answer_timeout}
        for name, seconds in timeouts.items():
            if not seconds > 0:
                raise ValueError(f"{name}_timeout={seconds} is not allowed. Set it to more than 0 seconds.")
        self.address = address
        self.client_id = client_id
        self._reconnect_timeout = reconnect_timeout
        self._answer_timeout = answer_timeout
        self._max_answer_bytes = max_answer_bytes
        # Protects the numbers of the messages. `exchange` holds it until the answer arrives.
        self._message_lock = threading.Lock()
        # Protects the attributes that the other threads of the link share: calls, failure and channel.
        self._state_lock = threading.Lock()
        # The call of each message in flight, by message number, and the latest unary call.
        self._message_calls: dict[int, Any] = {}
        self._unary_call: Any = None
        # The messages in flight, in their order: their numbers, and events that are set when the answers have arrived.
        self._in_flight: collections.deque[tuple[int, threading.Event]] = collections.deque()
        # Set when the latest message has been sent.
        self._latest_sent = threading.Event()
        self._latest_sent.set()
        self._failure: tuple[type[LinkError], str] | None = None
        self._interrupted = False
        self._closed = threading.Event()
        self._next_number = 0
        self._last_active_at = time.monotonic()
        self._make_channel = functools.partial(_create_channel, self._grpc, address, credentials)
        self._channel = self._make_channel()
        try:
            response = self._connect(session_config, connect_timeout)
        except BaseException:
            self._channel.close()
            raise
        self._session_id = response.session
        self._max_message_bytes = response.max_message_bytes
        # The interval is short enough for the timeout of the server, and to detect an unreachable server within
        # reconnect_timeout.
        self._heartbeat_interval = min(response.heartbeat_timeout_ms / 4000, reconnect_timeout / 3)
        self._heartbeat_thread = threading.Thread(
            target=self._send_heartbeats, name=f"heartbeat-{client_id}", daemon=True
        )
        self._heartbeat_thread.start()

    def exchange(self, blob: bytes) -> Blob:
        """
        Send a message to the server and return the answer.

        Raises:
            ValueError: If the server raised a `ValueError` (the text is the same), or the message is larger than the
                server accepts. The link stays usable.
            TimeoutError: If the server raised a `TimeoutError` (the text is the same). The link stays usable.
            ServerFailedError: If the server raised another exception. The link stays usable.
            LinkError: If the message could not be delivered. The link has ended. The subclasses in `errors.py`
                distinguish the reasons.
        """
        return self._send("Exchange", blob)

    def submit(self, blob: bytes) -> Future[Blob]:
        """
        Send a message, and return before its answer arrives.

        The server processes the messages in the order of the calls. If `max_in_flight` messages are in flight, the
        call waits for the oldest answer.

        Returns:
            `Future`: The answer. `result()` raises the errors of `exchange`.

        Raises:
            ValueError: If the message is larger than the server accepts. The link stays usable.
            LinkError: If the link has ended.
        """
        with self._message_lock:
            self._check_usable()
            self.check_size(len(blob))
            self._wait_for_answers(MAX_MESSAGES_IN_FLIGHT - 1)
            header = self._next_header(len(blob))
            answer: Future[Blob] = Future()
            # A running future cannot be cancelled.
            answer.set_running_or_notify_cancel()
            previous_sent, sent, answered = self._latest_sent, threading.Event(), threading.Event()
            self._latest_sent = sent
            self._in_flight.append((header.number, answered))
            self._next_number += 1
            thread = threading.Thread(
                target=self._deliver,
                args=(header, blob, answer, previous_sent, sent, answered),
                name=f"message-{header.number}-{self.client_id}",
                daemon=True,
            )
            try:
                thread.start()
            except BaseException as error:
                self._fail(LinkError, f"Message {header.number} was interrupted ({type(error).__name__}).")
                raise
        return answer

    def hello(self, hello: bytes) -> Blob:
        """Send the first message of a handshake or rotation and return the reply. Raises the errors of `exchange`."""
        return self._send("Hello", hello)

    def finish(self, finish: bytes) -> None:
        """Send the last message of a handshake or rotation. Raises the errors of `exchange`."""
        self._send("Finish", finish)

    def check_size(self, num_bytes: int) -> None:
        """
        Check that a message is not too large for the server.

        Args:
            num_bytes (`int`): Size of the message.

        Raises:
            ValueError: If the message is larger than the server accepts.
        """
        if num_bytes > self._max_message_bytes:
            raise ValueError(
                f"The message has {num_bytes} bytes, but the server accepts at most {self._max_message_bytes} bytes. "
                "Use a smaller batch or wire dtype, or raise max_message_bytes of the server."
            )

    def end_step(self) -> None:
        """Do nothing: the link does not count steps."""

    def close(self) -> None:
        """Disconnect from the server, if it is reachable, and close the connection."""
        if self._closed.is_set():
            return
        failure, _ = self._fail(LinkError, "The link was closed.")
        self._closed.set()
        self._unary_call.cancel()
        self._heartbeat_thread.join()
        if self._interrupted:
            # An interrupt inside gRPC can leave a lock of the channel held, on which `close` would wait forever.
            threading.Thread(target=self._channel.close, name="close of an interrupted channel", daemon=True).start()
            self._channel = self._make_channel()
        # Without this call, the server would treat the client as connected until its heartbeat_timeout.
        if failure not in (ServerUnreachableError, SessionLostError):
            try:
                self._unary("Leave", {"session": self._session_id}, timeout=min(5.0, self._reconnect_timeout))
            except self._grpc.RpcError as error:
                logger.warning(
                    f"Client {self.client_id!r} could not disconnect from {self.address}: {_status_text(error)}"
                )
        self._channel.close()

    def __enter__(self) -> GrpcLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, session_config: SessionConfig, connect_timeout: float) -> ConnectResponse:
        request = {
            "version": VERSION,
            "client_id": self.client_id,
            "process": secrets.token_hex(16),
            "terms": session_config.to_dict(),
        }
        deadline = time.monotonic() + connect_timeout
        pauses = _pauses()
        while True:
            pause = next(pauses)
            try:
                remaining = max(deadline - time.monotonic(), 0.01)
                return ConnectResponse.from_json(self._unary("Connect", request, timeout=remaining))
            except self._grpc.RpcError as error:
                code = error.code().name
                is_final = time.monotonic() + pause > deadline or "CERTIFICATE_VERIFY_FAILED" in str(error.details())
                if code == "UNIMPLEMENTED":
                    raise self._wrong_server_error(code) from None
                if code in (*_CONNECTION_ERRORS, "DEADLINE_EXCEEDED") and is_final:
                    raise ServerUnreachableError(self._no_connection_text(error, connect_timeout)) from None
                if code not in (*_CONNECTION_ERRORS, "DEADLINE_EXCEEDED", "ALREADY_EXISTS", _BUSY) or is_final:
                    raise ClientRefusedError(f"{self.address}: {error.details()}") from None
            except ValueError as error:
                raise self._wrong_server_error(error) from None
            time.sleep(pause)

    def _wrong_server_error(self, reason: object) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"The server at {self.address} is not a server of hf-federated ({reason}). Check the address."
        )

    def _no_connection_text(self, error: Any, connect_timeout: float) -> str:
        return (
            f"{self.client_id!r} got no connection to {self.address} within {connect_timeout:g} s. Check that the "
            "server runs at this address, that the server's certificate contains this host name, that both "
            "certificates are signed by the authority that the other party was given, and that the certificates have "
            f"not expired. gRPC status: {_status_text(error)}"
        )

    def _send(self, method: str, blob: bytes) -> Blob:
        """Send one message and return its answer, over as many connections as necessary."""
        with self._message_lock:
            self._check_usable()
            self.check_size(len(blob))
            self._wait_for_answers(0)
            header = self._next_header(len(blob))
            try:
                outcome = self._send_until_answered(method, header, blob)
            except LinkError:
                raise
            except BaseException as error:
                # After an interrupt, the state of the message is not known, and gRPC may never end the calls of the
                # channel.
                self._interrupted = not isinstance(error, Exception)
                self._fail(LinkError, f"Message {self._next_number} was interrupted ({type(error).__name__}).")
                raise
            self._next_number += 1
        return outcome.result()

    def _next_header(self, num_bytes: int) -> MessageHeader:
        number = self._next_number
        oldest = self._in_flight[0][0] if self._in_flight else number
        return MessageHeader(self._session_id, number, secrets.token_hex(8), num_bytes, oldest)

    def _wait_for_answers(self, num_messages: int) -> None:
        """Forget the oldest messages in flight if they are answered, and wait until at most `num_messages` remain."""
        while self._in_flight and (len(self._in_flight) > num_messages or self._in_flight[0][1].is_set()):
            self._in_flight[0][1].wait()
            self._in_flight.popleft()
        self._check_usable()

    def _deliver(
        self,
        header: MessageHeader,
        blob: bytes,
        answer: Future[Blob],
        previous_sent: threading.Event,
        sent: threading.Event,
        answered: threading.Event,
    ) -> None:
        """Send one message after the previous message was sent, and set its answer. Runs in a thread."""
        try:
            previous_sent.wait()
            answer.set_result(self._send_until_answered("Exchange", header, blob, sent.set).result())
        except BaseException as error:
            if not isinstance(error, (LinkError, ValueError, TimeoutError, ServerFailedError)):
                self._fail(LinkError, f"Message {header.number} was interrupted ({type(error).__name__}).")
            answer.set_exception(error)
        finally:
            sent.set()
            answered.set()

    def _send_until_answered(
        self, method: str, header: MessageHeader, blob: bytes, on_sent: Callable[[], object] | None = None
    ) -> Outcome:
        deadline = time.monotonic() + self._answer_timeout
        failing_since: float | None = None
        pauses = _pauses()
        while True:
            pause = next(pauses)
            started_at = time.monotonic()
            try:
                return self._attempt(method, header, blob, on_sent, timeout=max(deadline - started_at, 0.01))
            except self._grpc.RpcError as error:
                self._check_usable()
                code, now = error.code().name, time.monotonic()
                if code == "DEADLINE_EXCEEDED" or now + pause > deadline:
                    self._fail_and_raise(AnswerTimeoutError, self._no_answer_text(header.number, code))
                if code in _CONNECTION_ERRORS:
                    # Activity of the server restarts the timeout.
                    failing_since = max(now if failing_since is None else failing_since, self._last_active_at)
                    if now + pause - failing_since > self._reconnect_timeout:
                        self._fail_and_raise(ServerUnreachableError, self._unreachable_text(error))
                elif code == _BUSY:
                    failing_since = None
                else:
                    kind = SessionLostError if code == "FAILED_PRECONDITION" else LinkError
                    self._fail_and_raise(kind, f"{self.address}: {error.details()}{_ADVICE}")
            except ValueError as error:
                self._fail_and_raise(LinkError, f"The answer of {self.address} was rejected: {error}")
            if self._closed.wait(pause):
                self._check_usable()

    def _attempt(
        self, method: str, header: MessageHeader, blob: bytes, on_sent: Callable[[], object] | None, timeout: float
    ) -> Outcome:
        # The lock prevents a call from starting on a channel that is being replaced.
        with self._state_lock:
            # A stream needs a thread, but reports when the message has been sent. The server sees no difference.
            is_small = len(blob) <= (CHUNK_BYTES if on_sent is None else _SMALL_BYTES)
            start = self._channel.unary_stream if is_small else self._channel.stream_stream
            call = start(f"/{SERVICE}/{method}")(
                bytes(blob) if is_small else self._record_activity(split_into_chunks(blob), on_sent),
                timeout=timeout,
                metadata=((HEADER_KEY, header.to_json()),),
            )
            self._message_calls[header.number] = call
            if self._failure is not None:
                call.cancel()
        if is_small and on_sent is not None:
            on_sent()
        try:
            return Outcome.from_frames(self._record_activity(call), self._max_answer_bytes)
        finally:
            # Cancelling a completed call has no effect.
            call.cancel()
            with self._state_lock:
                self._message_calls.pop(header.number, None)

    def _record_activity(self, chunks: Iterator[bytes], on_end: Callable[[], object] | None = None) -> Iterator[bytes]:
        """
        Yield chunks, and record the time after each chunk as activity of the server.

        A sent chunk is also activity: gRPC requests the next chunk only after it transmitted the previous chunk.
        """
        for chunk in chunks:
            yield chunk
            self._last_active_at = time.monotonic()
        if on_end is not None:
            on_end()

    def _unary(self, method: str, request: dict[str, Any], timeout: float) -> bytes:
        start = self._channel.unary_unary(f"/{SERVICE}/{method}").future
        self._unary_call = start(json.dumps(request).encode(), timeout=timeout)
        try:
            answer: bytes = self._unary_call.result(timeout + _GRACE)
        except self._grpc.FutureTimeoutError:
            self._unary_call.cancel()
            raise _never_ended_error(self._grpc) from None
        return answer

    def _send_heartbeats(self) -> None:
        """Send heartbeats until the link ends, and end the link if the server does not answer them."""
        failing_since: float | None = None
        timeout = self._reconnect_timeout / 3
        while not self._closed.wait(self._heartbeat_interval) and self._failure is None:
            started_at = time.monotonic()
            try:
                self._unary("Heartbeat", {"session": self._session_id}, timeout)
                failing_since, self._last_active_at = None, time.monotonic()
            except self._grpc.FutureCancelledError:
                # The link is being closed.
                return
            except self._grpc.RpcError as error:
                code = error.code().name
                if code not in (*_CONNECTION_ERRORS, _BUSY, "DEADLINE_EXCEEDED"):
                    self._fail(SessionLostError, f"{self.address}: {error.details()}{_ADVICE}")
                    return
                if code == _BUSY or self._last_active_at > started_at:
                    # The server is alive, but busy or transmitting a large message.
                    failing_since = None
                    continue
                failing_since = max(started_at if failing_since is None else failing_since, self._last_active_at)
                if time.monotonic() - failing_since > self._reconnect_timeout:
                    self._fail(ServerUnreachableError, self._unreachable_text(error))
                    return
                if code == "DEADLINE_EXCEEDED":
                    self._replace_channel()

    def _replace_channel(self) -> None:
        """Replace a connection that is open but transmits no data. The messages in flight are sent again."""
        with self._state_lock:
            if self._failure is None:
                self._channel.close()
                self._channel = self._make_channel()

    def _no_answer_text(self, number: int, code: str) -> str:
        reason = "had no free slot for" if code == _BUSY else "did not answer"
        return (
            f"The server at {self.address} {reason} message {number} within answer_timeout={self._answer_timeout:g} s."
            f" The server may be waiting for other clients.{_ADVICE}"
        )

    def _unreachable_text(self, error: Any) -> str:
        return (
            f"The server at {self.address} was not active for reconnect_timeout={self._reconnect_timeout:g} s. gRPC "
            f"status: {_status_text(error)}.{_ADVICE}"
        )

    def _check_usable(self) -> None:
        """Raise the failure of the link, if it failed or was closed."""
        with self._state_lock:
            failure = self._failure
        if failure is not None:
            raise failure[0](failure[1])

    def _fail(self, kind: type[LinkError], text: str) -> tuple[type[LinkError], str]:
        """End the link, cancel the calls of the messages in flight, and return the first error of the link."""
        with self._state_lock:
            failure = self._failure = self._failure or (kind, text)
            for call in self._message_calls.values():
                call.cancel()
        return failure

    def _fail_and_raise(self, kind: type[LinkError], text: str) -> None:
        self._fail(kind, text)
        self._check_usable()


_ADVICE = (
    " It is not known whether the server processed the messages in flight. Create a new link and resume from a "
    "checkpoint."
)


def _never_ended_error(grpc: Any) -> Any:
    """Return the error of a call that gRPC does not end, which can happen after an interrupt."""

    class NeverEndedError(grpc.RpcError):
        def code(self) -> Any:
            return grpc.StatusCode.DEADLINE_EXCEEDED

        def details(self) -> str:
            return "gRPC did not end the call within its timeout."

    return NeverEndedError()


def _pauses() -> Iterator[float]:
    """Yield the seconds to wait between attempts. They double each time and are random, to spread the clients."""
    generator, longest = random.Random(), _FIRST_PAUSE
    while True:
        yield longest * generator.uniform(0.5, 1)
        longest = min(2 * longest, _LONGEST_PAUSE)


def _status_text(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"


def _create_channel(grpc: Any, address: str, credentials: TlsCredentials | None) -> Any:
    from grpc.experimental import ChannelOptions

    options = [
        # The link itself repeats calls. gRPC must reconnect fast enough for reconnect_timeout.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Each link of a process has its own connection.
        ("grpc.use_local_subchannel_pool", 1),
        # The answer to a small message is read without a further thread.
        (ChannelOptions.SingleThreadedUnaryStream, 1),
    ]
    if credentials is None:
        return grpc.insecure_channel(address, options)
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.secure_channel(address, tls, options)
