"""`GrpcLink`: a client's way to the server of a split model over gRPC, which outlives broken connections.

A message that gets no answer is sent again under the same number, and the server carries it out once. What cannot be
mended that way ends the link for good, with an error that says why: a message may then have been carried out or not,
and training goes on from a checkpoint, over a new link.
"""

from __future__ import annotations

import functools
import json
import random
import secrets
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from transformers.utils import logging

from .credentials import TlsCredentials, check_credentials, require_grpc
from .errors import AnswerTimeoutError, ClientRefusedError, LinkError, ServerUnreachableError, SessionLostError
from .protocol import (
    DEFAULT_MAX_MESSAGE_BYTES,
    HEADER_KEY,
    SERVICE,
    VERSION,
    ConnectResponse,
    MessageHeader,
    Outcome,
    chunks,
)
from .session_config import SessionConfig


logger = logging.get_logger(__name__)

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
# What says that the connection failed, and nothing of the message. INTERNAL is a stream that was reset.
_TROUBLE = frozenset({"CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN"})
_BUSY = "RESOURCE_EXHAUSTED"
# Seconds beyond a call's own timeout after which gRPC will not end it any more.
_GRACE = 2.0


class GrpcLink:
    """
    A link to a [`SplitServer`]. It is connected when it is made. With [`~hf_federated.security.encrypted_link.EncryptedLink`] around it messages are
    sealed on top of TLS.

    Args:
        address (`str`): The server's, as `host:port`; the host as its certificate names it.
        credentials ([`TlsCredentials`], *optional*): The client's. `None` only with `insecure=True`.
        client_id (`str`): Who this is, as the certificate says.
        terms ([`SessionConfig`]): What the server must have alike.
        insecure (`bool`, *optional*, defaults to `False`): To do without TLS, on a loopback address.
        connect_timeout (`float`, *optional*, defaults to `60`): Seconds to try to connect, while the server may still
            be starting or hold an earlier link of this client for alive.
        reconnect_timeout (`float`, *optional*, defaults to `45`): Seconds without a sign of life of the server after
            which it is gone. Shorter than its `heartbeat_timeout`.
        answer_timeout (`float`, *optional*, defaults to `600`): Seconds to wait for an answer of a server that lives,
            which may itself wait for other clients.
        max_answer_bytes (`int`, *optional*, defaults to 1 GiB): The largest answer that is taken.

    Raises:
        ImportError: If `grpcio` (extra `split`) is not installed.
        ValueError: If an argument is not allowed.
        ServerUnreachableError: If nobody answers, or TLS fails: gRPC does not tell one from the other.
        ClientRefusedError: If the server does not take this client, or the two do not agree; names what
            both have.

    Example: see [`SplitServer`].
    """

    def __init__(
        self,
        address: str,
        credentials: TlsCredentials | None,
        client_id: str,
        terms: SessionConfig,
        *,
        insecure: bool = False,
        connect_timeout: float = 60.0,
        reconnect_timeout: float = 45.0,
        answer_timeout: float = 600.0,
        max_answer_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._grpc = require_grpc(type(self).__name__)
        check_credentials(credentials, insecure, address)
        limits = {"connect": connect_timeout, "reconnect": reconnect_timeout, "answer": answer_timeout}
        for name, seconds in limits.items():
            if not seconds > 0:
                raise ValueError(f"{name}_timeout is {seconds}; it must be more than 0 seconds.")
        self.address = address
        self.client_id = client_id
        self._reconnect_timeout = reconnect_timeout
        self._answer_timeout = answer_timeout
        self._max_answer_bytes = max_answer_bytes
        # One message at a time; and what threads share besides.
        self._turn = threading.Lock()
        self._state = threading.Lock()
        # The message that is under way, and the call besides.
        self._call: Any = None
        self._question: Any = None
        self._broken: tuple[type[LinkError], str] | None = None
        self._interrupted = False
        self._closed = threading.Event()
        self._number = 0
        self._heard_at = time.monotonic()
        self._make_channel = functools.partial(_channel, self._grpc, address, credentials)
        self._channel = self._make_channel()
        try:
            granted = self._connect(terms, connect_timeout)
        except BaseException:
            self._channel.close()
            raise
        self._session = granted.session
        self._max_message_bytes = granted.max_message_bytes
        # Often enough for the server, and to miss it in time.
        self._interval = min(granted.heartbeat_timeout_ms / 4000, reconnect_timeout / 3)
        self._heart = threading.Thread(target=self._beat, name=f"split-heartbeat-{client_id}", daemon=True)
        self._heart.start()

    def exchange(self, blob: bytes) -> bytes:
        """
        Carry a message to the server and its answer back.

        Raises:
            ValueError: What the server's answering raised, by its text; or the message is larger than it takes.
            TimeoutError: As well. The link goes on.
            ServerFailedError: If the server failed otherwise. The link goes on.
            LinkError: If the message could not be carried, in one of the forms that `errors.py` names. The link ended.
        """
        return self._carry("Exchange", blob)

    def hello(self, hello: bytes) -> bytes:
        """Carry the first message of a handshake or rotation; raises as `exchange`."""
        return self._carry("Hello", hello)

    def finish(self, finish: bytes) -> None:
        """Carry its last message; raises as `exchange`."""
        self._carry("Finish", finish)

    def check_size(self, num_bytes: int) -> None:
        """
        Args:
            num_bytes (`int`): Of a message.

        Raises:
            ValueError: If it is larger than the server takes.
        """
        if num_bytes > self._max_message_bytes:
            raise ValueError(
                f"The message has {num_bytes} bytes, and the server takes at most {self._max_message_bytes}: use a "
                "smaller batch or wire dtype, or raise its max_message_bytes."
            )

    def end_step(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Take leave of the server, which need not be there, and let the connection go."""
        if self._closed.is_set():
            return
        self._break(LinkError, "This link was closed.")
        self._closed.set()
        self._question.cancel()
        self._heart.join()
        assert self._broken is not None
        if self._interrupted:
            self._channel.close()
            self._channel = self._make_channel()
        # Otherwise the server holds the client for alive until its heartbeat_timeout.
        if self._broken[0] not in (ServerUnreachableError, SessionLostError):
            try:
                self._unary("Leave", {"session": self._session}, timeout=min(5.0, self._reconnect_timeout))
            except self._grpc.RpcError as error:
                logger.warning(f"{self.client_id!r} could not take leave of {self.address}: {_details(error)}")
        self._channel.close()

    def __enter__(self) -> GrpcLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, terms: SessionConfig, connect_timeout: float) -> ConnectResponse:
        """What the server grants."""
        request = {
            "version": VERSION,
            "client_id": self.client_id,
            "process": secrets.token_hex(16),
            "terms": terms.to_dict(),
        }
        deadline = time.monotonic() + connect_timeout
        for pause in _pauses():
            try:
                left = max(deadline - time.monotonic(), 0.01)
                return ConnectResponse.from_text(self._unary("Connect", request, timeout=left))
            except self._grpc.RpcError as error:
                code = error.code().name
                ended = time.monotonic() + pause > deadline or "CERTIFICATE_VERIFY_FAILED" in str(error.details())
                if code == "UNIMPLEMENTED":
                    raise ServerUnreachableError(
                        f"What answers at {self.address} is no server of split models."
                    ) from None
                if code in (*_TROUBLE, "DEADLINE_EXCEEDED") and ended:
                    raise ServerUnreachableError(self._no_connection(error, connect_timeout)) from None
                if code not in (*_TROUBLE, "DEADLINE_EXCEEDED", "ALREADY_EXISTS", _BUSY) or ended:
                    raise ClientRefusedError(f"{self.address}: {error.details()}") from None
            except ValueError as error:
                raise ServerUnreachableError(f"What answers at {self.address} is no such server: {error}") from None
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _no_connection(self, error: Any, connect_timeout: float) -> str:
        return (
            f"{self.client_id!r} got no connection to {self.address} within {connect_timeout:g} s. Look whether the "
            "server runs there; whether its certificate is for this host name and by the authority that this client "
            "was given; whether the client's certificate is by the authority that the server was given; and whether "
            f"both are still good. gRPC says: {_details(error)}"
        )

    def _carry(self, method: str, blob: bytes) -> bytes:
        """Carry one message there and its answer back, over as many connections as it takes."""
        with self._turn:
            self._check_whole()
            self.check_size(len(blob))
            header = MessageHeader(self._session, self._number, secrets.token_hex(8), len(blob))
            try:
                outcome = self._until_answered(method, header, blob)
            except LinkError:
                raise
            except BaseException as error:
                # Interrupted, nobody knows how far it went, nor whether gRPC ends any call of the channel again.
                self._interrupted = not isinstance(error, Exception)
                self._break(LinkError, f"Message {self._number} was given up ({type(error).__name__}).")
                raise
            self._number += 1
        return outcome.result()

    def _until_answered(self, method: str, header: MessageHeader, blob: bytes) -> Outcome:
        deadline = time.monotonic() + self._answer_timeout
        troubled_at: float | None = None
        for pause in _pauses():
            began_at = time.monotonic()
            try:
                return self._try(method, header, blob, timeout=max(deadline - began_at, 0.01))
            except self._grpc.RpcError as error:
                self._check_whole()
                code, now = error.code().name, time.monotonic()
                if code == "DEADLINE_EXCEEDED" or now + pause > deadline:
                    self._raise(AnswerTimeoutError, self._no_answer(header.number, code))
                if code in _TROUBLE:
                    # A sign of life since then began it anew.
                    troubled_at = max(now if troubled_at is None else troubled_at, self._heard_at)
                    if now + pause - troubled_at > self._reconnect_timeout:
                        self._raise(ServerUnreachableError, self._gone(error))
                elif code == _BUSY:
                    troubled_at = None
                else:
                    kind = SessionLostError if code == "FAILED_PRECONDITION" else LinkError
                    self._raise(kind, f"{self.address}: {error.details()}{_ADVICE}")
            except ValueError as error:
                self._raise(LinkError, f"What {self.address} answered is refused: {error}")
            if self._closed.wait(pause):
                self._check_whole()
        raise AssertionError("unreachable")

    def _try(self, method: str, header: MessageHeader, blob: bytes, timeout: float) -> Outcome:
        # Under the lock a call is not begun on a channel that is being replaced.
        with self._state:
            call = self._channel.stream_stream(f"/{SERVICE}/{method}")(
                self._moving(chunks(blob)), timeout=timeout, metadata=((HEADER_KEY, header.to_text()),)
            )
            self._call = call
            if self._broken is not None:
                call.cancel()
        try:
            return Outcome.from_frames(self._moving(call), self._max_answer_bytes)
        finally:
            # Of one that ended this changes nothing.
            call.cancel()
            with self._state:
                self._call = None

    def _moving(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """What moves in either direction, which is a sign of life: gRPC asks for more where the last was carried."""
        for piece in pieces:
            yield piece
            self._heard_at = time.monotonic()

    def _unary(self, method: str, request: dict[str, Any], timeout: float) -> bytes:
        ask = self._channel.unary_unary(f"/{SERVICE}/{method}").future
        self._question = ask(json.dumps(request).encode(), timeout=timeout)
        try:
            answer: bytes = self._question.result(timeout + _GRACE)
        except self._grpc.FutureTimeoutError:
            self._question.cancel()
            raise _never_ended(self._grpc) from None
        return answer

    def _beat(self) -> None:
        """Give signs of life, and look for the server's, until the link ends."""
        failing_since: float | None = None
        timeout = self._reconnect_timeout / 3
        while not self._closed.wait(self._interval) and self._broken is None:
            began_at = time.monotonic()
            try:
                self._unary("Heartbeat", {"session": self._session}, timeout)
                failing_since, self._heard_at = None, time.monotonic()
            except self._grpc.FutureCancelledError:
                # The link is being closed.
                return
            except self._grpc.RpcError as error:
                code = error.code().name
                if code not in (*_TROUBLE, _BUSY, "DEADLINE_EXCEEDED"):
                    self._break(SessionLostError, f"{self.address}: {error.details()}{_ADVICE}")
                    return
                if code == _BUSY or self._heard_at > began_at:
                    # It lives, and has much to do or to carry.
                    failing_since = None
                    continue
                failing_since = began_at if failing_since is None else failing_since
                if time.monotonic() - failing_since > self._reconnect_timeout:
                    self._break(ServerUnreachableError, self._gone(error))
                    return
                if code == "DEADLINE_EXCEEDED":
                    self._renew_channel()

    def _renew_channel(self) -> None:
        """Leave a connection that stands and carries nothing. What was under way on it comes again over another."""
        with self._state:
            if self._broken is None:
                self._channel.close()
                self._channel = self._make_channel()

    def _no_answer(self, number: int, code: str) -> str:
        why = "had no room for it" if code == _BUSY else "did not answer it"
        return (
            f"The server at {self.address} {why} within answer_timeout, {self._answer_timeout:g} s: message {number}."
            f" It may wait for other clients.{_ADVICE}"
        )

    def _gone(self, error: Any) -> str:
        return (
            f"The server at {self.address} gave no sign of life for reconnect_timeout, {self._reconnect_timeout:g} s. "
            f"gRPC says: {_details(error)}.{_ADVICE}"
        )

    def _check_whole(self) -> None:
        with self._state:
            broken = self._broken
        if broken is not None:
            raise broken[0](broken[1])

    def _break(self, kind: type[LinkError], text: str) -> None:
        """End the link for good; the first reason stays. A message under way ends too."""
        with self._state:
            if self._broken is None:
                self._broken = (kind, text)
            if self._call is not None:
                self._call.cancel()

    def _raise(self, kind: type[LinkError], text: str) -> None:
        self._break(kind, text)
        self._check_whole()


_ADVICE = " Whether the last message was carried out is not known: make a new link, and resume from a checkpoint."


def _never_ended(grpc: Any) -> Any:
    """What a call ends with that gRPC itself does not end, as after an interrupt in its midst."""

    class NeverEndedError(grpc.RpcError):
        def code(self) -> Any:
            return grpc.StatusCode.DEADLINE_EXCEEDED

        def details(self) -> str:
            return "gRPC did not end the call in its time."

    return NeverEndedError()


def _pauses() -> Iterator[float]:
    """Seconds to wait between attempts: twice as long each time, and not the same for all clients."""
    generator, longest = random.Random(), _FIRST_PAUSE
    while True:
        yield longest * generator.uniform(0.5, 1)
        longest = min(2 * longest, _LONGEST_PAUSE)


def _details(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"


def _channel(grpc: Any, address: str, credentials: TlsCredentials | None) -> Any:
    options = [
        # When to try again is decided here, and soon enough within reconnect_timeout.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Another link of this process has a connection of its own.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if credentials is None:
        return grpc.insecure_channel(address, options)
    secured = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.secure_channel(address, secured, options)
