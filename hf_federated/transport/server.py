"""`GrpcServer`: a server that clients reach over gRPC with mutual TLS."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers.utils import logging

from ..security.encrypted_session import ServerSession
from ..utils.printable import printable_traceback
from .admission import Admission, CallDeadlines
from .connection import server_options
from .credentials import TlsCredentials, check_credentials, host_of, require_grpc
from .errors import RequestRejectedError
from .protocol import (
    DEFAULT_MAX_MESSAGE_BYTES,
    EXCHANGE_SMALL,
    HEADER_KEY,
    KINDS,
    MAX_MESSAGES_IN_FLIGHT,
    MAX_SMALL_MESSAGE_BYTES,
    MAX_STATUS_CHARACTERS,
    SERVICE,
    Outcome,
    rejected_if_invalid,
    split_prefix,
)
from .read_gate import ReadGate
from .service import Answer, Service
from .session_config import SessionConfig
from .session_registry import SessionRegistry


logger = logging.get_logger(__name__)

T = TypeVar("T")

# A client needs calls for its messages in flight and their repetitions, a heartbeat, and a connect or leave. If a
# connection breaks, its calls also count until they end, at the latest after `message_timeout`.
CALLS_PER_CLIENT = 2 * MAX_MESSAGES_IN_FLIGHT + 4
# Threads for calls that are refused at once, and number of calls that may wait for these threads.
_SPARE_THREADS = 4
_MAX_WAITING_CALLS = 1024


class GrpcServer:
    """
    Receives the messages of clients and returns the answers.

    The certificate authenticates a client: its common name must be the client id, and `clients` must contain the id.
    The server transmits bytes and does not interpret them; `answer` does the work. If a message is delivered again,
    the server returns the same bytes and does not call `answer` again.

    A client can send up to eight messages before the answers arrive. The server stores the message of a client that it
    processes, early messages of together at most `max_message_bytes`, and up to eight answers that the client has not
    confirmed.

    Args:
        answer (`Callable[[str, Blob], bytes | Pieces | Deferred]`):
            Returns the answer to a message. The arguments are the client id and the message, as `bytes` or as a
            writable `memoryview`. The server calls `answer` in its threads, for one message of a client at a time,
            and for several clients concurrently. `answer` may block, for example until the messages of the other
            clients arrive. The client receives the text of a `ValueError` or `TimeoutError`, and the class name of
            any other error. `answer` must return when the server closes.
        credentials ([`TlsCredentials`], *optional*):
            Credentials of the server. `None` requires `insecure=True`.
        clients (`Sequence[str]`):
            Ids of the clients that may connect.
        session_config ([`SessionConfig`]):
            Settings that a client must share with the server.
        address (`str`, *optional*, defaults to `"127.0.0.1:0"`):
            Address to listen on, as `host:port`. Port 0 selects a free port.
        insecure (`bool`, *optional*, defaults to `False`):
            Whether to use no TLS. Allowed on a loopback address only.
        encryption (`Callable[[str], ServerSession]`, *optional*):
            Creates the encrypted session for a client id, if messages are encrypted in addition to TLS.
        on_connected (`Callable[[str], None]`, *optional*):
            Called with the client id after a client connects and before its first message. A client that connects
            again starts from the beginning, so discard its unfinished work. A `ValueError` refuses the client.
        on_left (`Callable[[str], None]`, *optional*):
            Called with the client id when a client disconnects.
        on_lost (`Callable[[str], None]`, *optional*):
            Called with the client id, in a separate thread, when a client was inactive for `heartbeat_timeout`.
            Messages of this client that are in progress end when `answer` returns. If other clients wait for this
            client, continue without it or raise an error in `answer`.
        heartbeat_timeout (`float`, *optional*, defaults to `60`):
            Seconds without activity after which a client is lost. Clients send four heartbeats in this time. Choose a
            larger value than the clients' `reconnect_timeout`.
        max_message_bytes (`int`, *optional*, defaults to 1 GiB):
            Size of the largest message that a client may send.
        message_timeout (`float`, *optional*, defaults to `30`):
            Seconds until the first message of a call and each further part of a message must arrive. A part has 1 MiB.
            The server ends calls that stay silent longer. The client sends the message again.
        read_gate ([`ReadGate`], *optional*):
            Limits how many large messages are in memory. `answer` must call `leave` for each message of the client.
            The server then reads a message after it processed the previous message of the client. By default there
            is no limit.
        max_exchanges (`int`, *optional*):
            Number of clients whose messages are read and processed concurrently. Defaults to all clients. Further
            clients must try again, and no message is read before the previous message of its client was processed. A
            client with several messages in flight can keep its slot until they are processed. Choose at least the
            number of clients that wait for each other in `answer`.

    Raises:
        ImportError: If `grpcio` (extra `network`) is not installed.
        TypeError: If `clients` is a string.
        ValueError: If an argument is not allowed.
        OSError: If the server cannot listen on the address.

    Example:

    ```python
    >>> from hf_federated.split import Cut, ModelFingerprint, SplitSessionConfig, Wire
    >>> from hf_federated.transport import GrpcLink, GrpcServer

    >>> model = ModelFingerprint({"hidden_size": 16}, weight_map="", samples={}, commit="a1b2")
    >>> session_config = SplitSessionConfig(model, Cut(4), Wire("float32"))
    >>> def answer(client_id, message):
    ...     return message.upper()

    >>> with GrpcServer(answer, None, ["north"], session_config, insecure=True) as server:
    ...     with GrpcLink(server.address, None, "north", session_config, insecure=True) as link:
    ...         print(link.exchange(b"hidden states"), server.is_alive("north"))
    b'HIDDEN STATES' True
    ```
    """

    def __init__(
        self,
        answer: Answer,
        credentials: TlsCredentials | None,
        clients: Sequence[str],
        session_config: SessionConfig,
        *,
        address: str = "127.0.0.1:0",
        insecure: bool = False,
        encryption: Callable[[str], ServerSession] | None = None,
        on_connected: Callable[[str], None] | None = None,
        on_left: Callable[[str], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        heartbeat_timeout: float = 60.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        message_timeout: float = 30.0,
        max_exchanges: int | None = None,
        read_gate: ReadGate | None = None,
    ) -> None:
        grpc = require_grpc(type(self).__name__)
        check_credentials(credentials, insecure, address)
        _check_clients(clients)
        limits = {
            "heartbeat_timeout": heartbeat_timeout,
            "max_message_bytes": max_message_bytes,
            "message_timeout": message_timeout,
            "max_exchanges": len(clients) if max_exchanges is None else max_exchanges,
        }
        for name, value in limits.items():
            if not value > 0:
                raise ValueError(f"{name}={value} is not allowed. Set it to more than 0, or leave it out.")
        self._sessions = SessionRegistry(clients, heartbeat_timeout, on_lost)
        self._service = Service(
            answer,
            self._sessions,
            session_config,
            encryption=encryption,
            max_message_bytes=max_message_bytes,
            max_exchanges=max_exchanges or len(clients),
            on_connected=on_connected,
            on_left=on_left,
            read_gate=read_gate,
        )
        self._deadlines = CallDeadlines(message_timeout)
        handlers = _GrpcHandlers(self._service, grpc, self._deadlines, has_certificates=credentials is not None)
        num_threads = CALLS_PER_CLIENT * len(clients) + _SPARE_THREADS
        self._grpc_server = grpc.server(
            ThreadPoolExecutor(num_threads, thread_name_prefix="grpc-server"),
            handlers=[handlers.generic_handler()],
            # The admission bounds the calls that hold a thread. This limit bounds the calls that wait for a thread to
            # be refused. Beyond the limit the server refuses calls unseen, and the clients try again.
            maximum_concurrent_rpcs=num_threads + _MAX_WAITING_CALLS,
            options=server_options(heartbeat_timeout, max_streams=2 * CALLS_PER_CLIENT),
        )
        self.address = _listen(self._grpc_server, grpc, address, credentials)

    def start(self) -> None:
        """Start to accept clients."""
        self._sessions.start()
        self._deadlines.start()
        self._grpc_server.start()

    def close(self, grace: float = 1.0) -> None:
        """
        Stop the server. New calls are refused.

        Args:
            grace (`float`, *optional*, defaults to `1`): Seconds until calls in progress are aborted. The processing
                of a message is not aborted.
        """
        self._grpc_server.stop(grace).wait()
        self._deadlines.close()
        self._sessions.close()

    def is_alive(self, client_id: str) -> bool:
        """Whether a client is connected and was active within `heartbeat_timeout`."""
        return self._sessions.is_alive(client_id)

    def expel(self, client_id: str, reason: str = "") -> None:
        """End the session of a client for a reason, and refuse the client from now on."""
        self._sessions.expel(client_id, reason)

    def seconds_since_heard(self, client_id: str) -> float | None:
        """Seconds since the last activity of a connected client, or `None` if the client is not connected."""
        return self._sessions.seconds_since_heard(client_id)

    def __enter__(self) -> GrpcServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _GrpcHandlers:
    """
    The gRPC methods of a [`Service`].

    Args:
        service ([`Service`]): Processes the requests.
        grpc (`Any`): The module `grpc`.
        deadlines ([`CallDeadlines`]): Ends silent calls.
        has_certificates (`bool`): Whether clients have certificates, which contain their ids.
    """

    def __init__(self, service: Service, grpc: Any, deadlines: CallDeadlines, has_certificates: bool) -> None:
        self._service = service
        self._grpc = grpc
        self._admission = Admission(service.sessions.clients, CALLS_PER_CLIENT)
        self._deadlines = deadlines
        self._has_certificates = has_certificates

    def generic_handler(self) -> Any:
        """
        Return the handler of all methods for `grpc.server`.

        The requests of all methods are streams. gRPC starts the handler of a stream before a message arrives, so that
        the handler can refuse a stranger at once. The handler of a unary request would hold its thread until the
        message arrives. A client sees no difference.
        """
        grpc, service = self._grpc, self._service
        requests = {"Connect": service.connect, "Heartbeat": service.heartbeat, "Leave": service.leave}
        methods: dict[str, Any] = {
            **{name: functools.partial(self._answer_request, process) for name, process in requests.items()},
            **{name: functools.partial(self._answer_message, kind) for name, kind in KINDS.items()},
        }
        handlers = {
            name: grpc.stream_stream_rpc_method_handler(functools.partial(self._handle, method))
            for name, method in methods.items()
        }
        handlers[EXCHANGE_SMALL] = grpc.stream_unary_rpc_method_handler(self._handle_small_message)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _handle(
        self, method: Callable[..., Iterator[bytes]], chunks: Iterator[bytes], context: Any
    ) -> Iterator[bytes]:
        """Admit a call and answer it. The call counts until its answer is sent: it holds a thread until then."""
        with contextlib.ExitStack() as stack:
            frames = self._process_call(stack, method, chunks, context)
            if frames is not None:
                yield from frames

    def _handle_small_message(self, chunks: Iterator[bytes], context: Any) -> bytes:
        """Admit a call with a small message and answer it."""
        with contextlib.ExitStack() as stack:
            return self._process_call(stack, self._answer_small_message, chunks, context) or b""

    def _process_call(
        self, stack: contextlib.ExitStack, method: Callable[..., T], chunks: Iterator[bytes], context: Any
    ) -> T | None:
        """Admit a call until the end of the stack, and process it. Return `None` if it has ended before."""
        try:
            owner = self._certificate_owner(context)
            stack.enter_context(self._admission.admit(owner))
            name = "A connection without TLS" if owner is None else f"Client {owner!r}"
            return method(self._deadlines.watch(chunks, context.cancel, name), context, owner)
        except Exception as error:
            self._abort(context, error)
            return None

    def _answer_request(
        self,
        process: Callable[[bytes, str | None], bytes],
        chunks: Iterator[bytes],
        context: Any,
        owner: str | None,
    ) -> Iterator[bytes]:
        request = next(chunks, None)
        with rejected_if_invalid():
            if request is None:
                raise ValueError("The call has no request.")
        return iter([process(request, owner)])

    def _answer_message(self, kind: str, chunks: Iterator[bytes], context: Any, owner: str | None) -> Iterator[bytes]:
        outcome = self._exchange(kind, _header_text(context), chunks, context, owner)
        return iter(()) if outcome is None else outcome.frames()

    def _answer_small_message(self, chunks: Iterator[bytes], context: Any, owner: str | None) -> bytes:
        with rejected_if_invalid():
            header_text, message = split_prefix(next(chunks, b""), "The message")
            if len(message) > MAX_SMALL_MESSAGE_BYTES:
                raise ValueError(
                    f"The message has {len(message)} bytes, but a message of {EXCHANGE_SMALL} has at most "
                    f"{MAX_SMALL_MESSAGE_BYTES}."
                )
        outcome = self._exchange("exchange", header_text, [message], context, owner)
        return b"" if outcome is None else outcome.to_frame()

    def _exchange(
        self, kind: str, header_text: str | bytes, chunks: Iterable[bytes], context: Any, owner: str | None
    ) -> Outcome | None:
        session, header = self._service.session_of_message(header_text, owner)
        # When the call ends, a thread that waits for the outcome must notice that the client no longer waits.
        context.add_callback(session.executor.notify_waiters)
        with session.register_call(header.number, context.cancel):
            return self._service.exchange(kind, session, header, chunks, context.is_active)

    def _certificate_owner(self, context: Any) -> str | None:
        """
        Return the client id in the certificate of a call, or `None` without TLS.

        Raises:
            RequestRejectedError: If the certificate contains no client id.
        """
        if not self._has_certificates:
            return None
        try:
            (name,) = context.auth_context().get("x509_common_name", ())
            return bytes(name).decode()
        except ValueError:
            raise RequestRejectedError(
                "UNAUTHENTICATED", "The common name of the certificate is not a client id."
            ) from None

    def _abort(self, context: Any, error: Exception) -> None:
        """Abort an active call. The client receives the text of a `RequestRejectedError`; other errors are logged."""
        if not context.is_active():
            return
        if isinstance(error, RequestRejectedError):
            context.abort(self._grpc.StatusCode[error.code], str(error)[:MAX_STATUS_CHARACTERS])
        logger.error(f"The server failed to process a call.\n{printable_traceback(error)}")
        context.abort(self._grpc.StatusCode.ABORTED, "The server failed. See the log of the server.")


def _header_text(context: Any) -> str | bytes:
    headers: list[str | bytes] = [item.value for item in context.invocation_metadata() if item.key == HEADER_KEY]
    if len(headers) != 1:
        raise RequestRejectedError(
            "INVALID_ARGUMENT",
            f"The request violates the protocol: a call must have one header {HEADER_KEY}, got {len(headers)}.",
        )
    return headers[0]


def _check_clients(clients: Sequence[str]) -> None:
    # A string is a sequence too: each of its characters would be a client id.
    if isinstance(clients, str):
        raise TypeError(f"clients is the string {clients!r}. Pass a list: [{clients!r}].")
    if not clients or "" in clients or len(set(clients)) != len(clients):
        raise ValueError(f"clients must be a non-empty list of different, non-empty client ids, got {list(clients)}.")


def _listen(server: Any, grpc: Any, address: str, credentials: TlsCredentials | None) -> str:
    """
    Add a port to a gRPC server. Return the address of the server as `host:port`.

    Raises:
        OSError: If the server cannot listen on the address.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            pair = (credentials.key, credentials.certificate)
            tls = grpc.ssl_server_credentials([pair], credentials.authority, require_client_auth=True)
            port = server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise OSError(
            f"The server cannot listen on {address}. Check that the port is free and that the address belongs to this"
            f" machine. ({error})"
        ) from None
    return f"{host_of(address)}:{port}"
