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
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager

from transformers.utils import logging

from ..utils.arguments import require
from ..utils.printable import printable
from .attempts import Attempts
from .connection import BUSY, CONNECTION_ERRORS, Connection, details_of, pauses, status_text
from .credentials import TlsCredentials, check_credentials, require_grpc
from .errors import (
    AnswerTimeoutError,
    LinkError,
    ServerFailedError,
    ServerUnreachableError,
    SessionLostError,
)
from .heartbeats import ADVICE, Heartbeats
from .link_state import LinkState
from .protocol import (
    DEFAULT_MAX_MESSAGE_BYTES,
    MAX_MESSAGES_IN_FLIGHT,
    Blob,
    MessageHeader,
    Outcome,
)
from .session_config import SessionConfig


logger = logging.get_logger(__name__)


class GrpcLink(AbstractContextManager["GrpcLink"]):
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
        max_message_bytes (`int`): Size of the largest message that the server accepts.
        session_id (`str`): Id of the session at the server.

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
            require(f"{name}_timeout", seconds, seconds > 0, "a positive number of seconds")
        self.address = address
        self.client_id = client_id
        self._reconnect_timeout = reconnect_timeout
        self._answer_timeout = answer_timeout
        # Protects the numbers of the messages. `exchange` holds it until the answer arrives.
        self._message_lock = threading.Lock()
        # The messages in flight, in their order: their numbers, and events that are set when the answers have arrived.
        self._in_flight: collections.deque[tuple[int, threading.Event]] = collections.deque()
        # Set when the latest message has been sent.
        self._latest_sent = threading.Event()
        self._latest_sent.set()
        self._interrupted = False
        self._next_number = 0
        self._connection = Connection(self._grpc, address, credentials, client_id, reconnect_timeout)
        try:
            response = self._connection.open_session(session_config, connect_timeout)
        except BaseException:
            self._connection.close()
            raise
        self.session_id = response.session
        self.max_message_bytes = response.max_message_bytes
        self._state = LinkState(self._connection)
        self._attempts = Attempts(self._grpc, self._state, max_answer_bytes)
        # The interval is short enough for the timeout of the server, and to detect an unreachable server within
        # reconnect_timeout.
        interval = min(response.heartbeat_timeout_ms / 4000, reconnect_timeout / 3)
        self._heartbeats = Heartbeats(self._grpc, self._state, address, response.session, interval, reconnect_timeout)
        self._heartbeats.start()

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
            self._state.check_usable()
            self.check_size(len(blob))
            self._wait_for_answers(MAX_MESSAGES_IN_FLIGHT - 1)
            header = self._next_header(len(blob))
            answer: Future[Blob] = Future()
            # A running future cannot be cancelled.
            answer.set_running_or_notify_cancel()
            previous_sent, sent, answered = self._latest_sent, threading.Event(), threading.Event()

            def deliver() -> None:
                """Send the message after the previous message was sent, and set its answer."""
                try:
                    previous_sent.wait()
                    answer.set_result(self._send_until_answered("Exchange", header, blob, sent.set).result())
                except BaseException as error:
                    if not isinstance(error, (LinkError, ValueError, TimeoutError, ServerFailedError)):
                        self._state.fail(LinkError, _interrupted_text(header.number, error))
                    answer.set_exception(error)
                finally:
                    sent.set()
                    answered.set()

            self._latest_sent = sent
            self._in_flight.append((header.number, answered))
            self._next_number += 1
            name = f"message-{header.number}-{self.client_id}"
            try:
                threading.Thread(target=deliver, name=name, daemon=True).start()
            except BaseException as error:
                self._state.fail(LinkError, _interrupted_text(header.number, error))
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
        if num_bytes > self.max_message_bytes:
            raise ValueError(
                f"The message has {num_bytes} bytes, but the server accepts at most {self.max_message_bytes} bytes. "
                "Use a smaller batch or wire dtype, or raise max_message_bytes of the server."
            )

    def end_step(self) -> None:
        """Do nothing: the link does not count steps."""

    def close(self) -> None:
        """Disconnect from the server, if it is reachable, and close the connection."""
        if self._state.closed.is_set():
            return
        failure, _ = self._state.fail(LinkError, "The link was closed.")
        self._state.closed.set()
        self._heartbeats.stop()
        if self._interrupted:
            self._connection.abandon()
        # Without this call, the server would treat the client as connected until its heartbeat_timeout.
        if failure not in (ServerUnreachableError, SessionLostError):
            self._leave()
        self._connection.close()

    def _leave(self) -> None:
        timeout = min(5.0, self._reconnect_timeout / 3)
        for is_last in (False, True):
            try:
                self._connection.call("Leave", {"session": self.session_id}, timeout)
                return
            except self._grpc.RpcError as error:
                if is_last or error.code().name != "DEADLINE_EXCEEDED":
                    text = f"Client {self.client_id!r} could not disconnect from {self.address}: {status_text(error)}"
                    logger.warning(text)
                    return
                # The connection may be held.
                self._connection.abandon()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, method: str, blob: bytes) -> Blob:
        """Send one message and return its answer, over as many connections as necessary."""
        with self._message_lock:
            self._state.check_usable()
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
                self._state.fail(LinkError, _interrupted_text(header.number, error))
                raise
            self._next_number += 1
        return outcome.result()

    def _next_header(self, num_bytes: int) -> MessageHeader:
        number = self._next_number
        oldest = self._in_flight[0][0] if self._in_flight else number
        return MessageHeader(self.session_id, number, secrets.token_hex(8), num_bytes, oldest)

    def _wait_for_answers(self, num_messages: int) -> None:
        """Forget the oldest messages in flight if they are answered, and wait until at most `num_messages` remain."""
        while self._in_flight and (len(self._in_flight) > num_messages or self._in_flight[0][1].is_set()):
            self._in_flight[0][1].wait()
            self._in_flight.popleft()
        self._state.check_usable()

    def _send_until_answered(
        self, method: str, header: MessageHeader, blob: bytes, on_sent: Callable[[], object] | None = None
    ) -> Outcome:
        deadline = time.monotonic() + self._answer_timeout
        failing_since: float | None = None
        num_attempts = 0
        waits = pauses()
        while True:
            pause = next(waits)
            num_attempts += 1
            try:
                timeout = max(deadline - time.monotonic(), 0.01)
                return self._attempts.send(method, header, blob, on_sent, timeout)
            except self._grpc.RpcError as error:
                self._state.check_usable()
                code, now = error.code().name, time.monotonic()
                if code == "DEADLINE_EXCEEDED" or now + pause > deadline:
                    self._state.fail_and_raise(AnswerTimeoutError, self._no_answer_text(header.number, code))
                if code in CONNECTION_ERRORS:
                    # Activity of the server restarts the timeout.
                    failing_since = max(now if failing_since is None else failing_since, self._state.last_active_at)
                    if now + pause - failing_since > self._reconnect_timeout:
                        text = self._heartbeats.unreachable_text(error, num_attempts, failing_since)
                        self._state.fail_and_raise(ServerUnreachableError, text)
                elif code == BUSY:
                    failing_since = None
                else:
                    kind = SessionLostError if code == "FAILED_PRECONDITION" else LinkError
                    self._state.fail_and_raise(kind, f"{self.address}: {details_of(error)}{ADVICE}")
            except ValueError as error:
                self._state.fail_and_raise(LinkError, f"The answer of {self.address} was rejected: {printable(error)}")
            if self._state.closed.wait(pause):
                self._state.check_usable()

    def _no_answer_text(self, number: int, code: str) -> str:
        reason = "had no free slot for" if code == BUSY else "did not answer"
        return (
            f"The server at {self.address} {reason} message {number} within answer_timeout={self._answer_timeout:g} s."
            f" The server may be waiting for other clients.{ADVICE}"
        )


def _interrupted_text(number: int, error: BaseException) -> str:
    return f"Message {number} was interrupted ({type(error).__name__})."
