"""`SplitServer`: the clients of a split model reach it over gRPC, with TLS that shows both sides who is who.

It carries bytes and knows nothing of models: `answer` does the work, and may take long, as where clients meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from transformers.utils import logging

from ..security.encrypted_session import ServerSession
from .credentials import TlsCredentials, check_credentials, host_of, require_grpc
from .errors import RequestRejectedError
from .protocol import DEFAULT_MAX_MESSAGE_BYTES, HEADER_KEY, KINDS, MAX_STATUS_CHARACTERS, SERVICE, Outcome
from .service import Answer, Service
from .session_config import SessionConfig
from .session_registry import SessionRegistry


logger = logging.get_logger(__name__)

# Of one client at once: a message that is carried out, its repetition, a heartbeat, a connection or farewell.
_CALLS_PER_CLIENT = 4


class SplitServer:
    """
    Answers the clients of a split model.

    A client is who its certificate says: its common name must be the id that the client gives, and among `clients`.
    A message that comes again is answered with the same bytes and not carried out again. What a client sends is read
    when there is room for it: at most one message and one answer a client are in memory.

    Args:
        answer (`Callable[[str, bytes], bytes]`):
            Given a client's id and a message, the answer. Called in threads of the server, for one message of a client
            at a time, for several clients side by side. A `ValueError` or `TimeoutError` reaches the client by its
            text; of anything else it learns the class alone. It must come to an end when the server closes.
        credentials ([`TlsCredentials`], *optional*): The server's. `None` only with `insecure=True`.
        clients (`Sequence[str]`): Ids of those that may come.
        terms ([`SessionConfig`]): What a client must have alike.
        address (`str`, *optional*, defaults to `"127.0.0.1:0"`): Where to listen; port 0 takes a free one.
        insecure (`bool`, *optional*, defaults to `False`): To do without TLS, on a loopback address.
        encryption (`Callable[[str], ServerSession]`, *optional*):
            A new session of keys for a client id, where messages are sealed on top of TLS.
        on_connected (`Callable[[str], None]`, *optional*):
            Called with a client's id before its first message. It begins anew then: whatever was under way with it is
            void. A `ValueError` refuses the client.
        on_left (`Callable[[str], None]`, *optional*): Called when a client says that it leaves.
        on_lost (`Callable[[str], None]`, *optional*):
            Called when a client was not heard for `heartbeat_timeout`, from a thread of its own. Messages of it that
            are still being carried out end as `answer` does: where others wait for it, let them go on or fail.
        heartbeat_timeout (`float`, *optional*, defaults to `60`): Seconds. Clients give four signs of life in that
            time. Longer than a client's `reconnect_timeout`.
        max_message_bytes (`int`, *optional*, defaults to 1 GiB): The largest message that a client may send.
        max_exchanges (`int`, *optional*):
            Clients whose messages are read and carried out side by side, by default all. Others are told to come
            again, so let it be no less than meet.

    Raises:
        ImportError: If `grpcio` (extra `split`) is not installed.
        ValueError: If an argument is not allowed.
        OSError: If the address cannot be listened at.

    Example:

    ```python
    >>> from hf_federated.split import Cut, Wire
    >>> from hf_federated.transport import GrpcLink, SplitServer
    >>> from hf_federated.split import ModelFingerprint, SplitSessionConfig

    >>> model = ModelFingerprint({"hidden_size": 16}, weight_map="", samples={}, commit="a1b2")
    >>> terms = SplitSessionConfig(model, Cut(4), Wire("float32"))
    >>> def answer(client_id, message):
    ...     return message.upper()

    >>> with SplitServer(answer, None, ["north"], terms, insecure=True) as server:
    ...     with GrpcLink(server.address, None, "north", terms, insecure=True) as link:
    ...         print(link.exchange(b"hidden states"), server.is_alive("north"))
    b'HIDDEN STATES' True
    ```
    """

    def __init__(
        self,
        answer: Answer,
        credentials: TlsCredentials | None,
        clients: Sequence[str],
        terms: SessionConfig,
        *,
        address: str = "127.0.0.1:0",
        insecure: bool = False,
        encryption: Callable[[str], ServerSession] | None = None,
        on_connected: Callable[[str], None] | None = None,
        on_left: Callable[[str], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
        heartbeat_timeout: float = 60.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_exchanges: int | None = None,
    ) -> None:
        grpc = require_grpc(type(self).__name__)
        check_credentials(credentials, insecure, address)
        _check_clients(clients)
        for name, value in (("heartbeat_timeout", heartbeat_timeout), ("max_message_bytes", max_message_bytes)):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be more than 0.")
        if max_exchanges is not None and max_exchanges < 1:
            raise ValueError(f"max_exchanges is {max_exchanges}; allowed are 1 or more, or None for all clients.")
        self._presence = SessionRegistry(clients, heartbeat_timeout, on_lost)
        self._service = Service(
            answer,
            self._presence,
            terms,
            encryption=encryption,
            max_message_bytes=max_message_bytes,
            max_exchanges=max_exchanges or len(clients),
            on_connected=on_connected,
            on_left=on_left,
        )
        self._calls = _Calls(self._service, grpc, names_owners=credentials is not None)
        num_calls = _CALLS_PER_CLIENT * len(clients) + 2
        self._grpc_server = grpc.server(
            ThreadPoolExecutor(num_calls, thread_name_prefix="split-server"),
            handlers=[self._calls.handler()],
            # What exceeds the threads would wait unseen: it is refused, and comes again.
            maximum_concurrent_rpcs=num_calls,
            # Otherwise a second server may take the same port, and gets some of the clients.
            options=[("grpc.so_reuseport", 0)],
        )
        self.address = _listen(self._grpc_server, grpc, address, credentials)

    def start(self) -> None:
        """Take clients."""
        self._presence.start()
        self._grpc_server.start()

    def close(self, grace: float = 1.0) -> None:
        """
        Take no more calls.

        Args:
            grace (`float`, *optional*, defaults to `1`): Seconds for those under way, which are cut off then. A
                message that is being carried out still comes to its end.
        """
        self._grpc_server.stop(grace).wait()
        self._presence.close()

    def is_alive(self, client_id: str) -> bool:
        """Whether a client is connected and was heard within `heartbeat_timeout`."""
        return self._presence.is_alive(client_id)

    def seconds_since_heard(self, client_id: str) -> float | None:
        """How long a client that is connected was not heard; `None` of one that is not."""
        return self._presence.seconds_since_heard(client_id)

    def __enter__(self) -> SplitServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Calls:
    """The service as gRPC calls it."""

    def __init__(self, service: Service, grpc: Any, names_owners: bool) -> None:
        self._service = service
        self._grpc = grpc
        self._names_owners = names_owners

    def handler(self) -> Any:
        """What a gRPC server takes."""
        grpc, service = self._grpc, self._service
        unary = {"Connect": service.connect, "Heartbeat": service.heartbeat, "Leave": service.leave}
        methods = {name: grpc.unary_unary_rpc_method_handler(self._unary(do)) for name, do in unary.items()}
        for name, kind in KINDS.items():
            methods[name] = grpc.stream_stream_rpc_method_handler(self._stream(kind))
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _unary(self, do: Callable[[bytes, str | None], bytes]) -> Callable[[bytes, Any], bytes]:
        def call(request: bytes, context: Any) -> bytes:
            try:
                return do(request, self._owner(context))
            except Exception as error:
                self._abort(context, error)
                return b""

        return call

    def _stream(self, kind: str) -> Callable[[Iterator[bytes], Any], Iterator[bytes]]:
        def call(pieces: Iterator[bytes], context: Any) -> Iterator[bytes]:
            try:
                outcome = self._exchange(kind, pieces, context)
            except Exception as error:
                self._abort(context, error)
                return
            if outcome is not None:
                yield from outcome.frames()

        return call

    def _exchange(self, kind: str, pieces: Iterator[bytes], context: Any) -> Outcome | None:
        session, header = self._service.find(_header_text(context), self._owner(context))
        # Who waits for an answer looks again when the call ends.
        context.add_callback(session.once.wake)
        with session.newest_call(context.cancel):
            return self._service.exchange(kind, session, header, pieces, context.is_active)

    def _owner(self, context: Any) -> str | None:
        """
        Whom the caller's certificate names.

        Raises:
            RequestRejectedError: If it names nobody.
        """
        if not self._names_owners:
            return None
        names = context.auth_context().get("x509_common_name", ())
        try:
            (name,) = names
            return bytes(name).decode()
        except ValueError:
            raise RequestRejectedError(
                "UNAUTHENTICATED", "The certificate has no common name that is a client's id."
            ) from None

    def _abort(self, context: Any, error: Exception) -> None:
        """End a call with a status, if it did not end. Of what is not worded for the client it learns nothing."""
        if not context.is_active():
            return
        if isinstance(error, RequestRejectedError):
            context.abort(self._grpc.StatusCode[error.code], str(error)[:MAX_STATUS_CHARACTERS])
        logger.error("A call failed.", exc_info=error)
        context.abort(self._grpc.StatusCode.ABORTED, "The server failed. Its log says why.")


def _header_text(context: Any) -> str | bytes:
    found: list[str | bytes] = [own.value for own in context.invocation_metadata() if own.key == HEADER_KEY]
    if len(found) != 1:
        raise RequestRejectedError("INVALID_ARGUMENT", "What came is not of this protocol: a call has one header.")
    return found[0]


def _check_clients(clients: Sequence[str]) -> None:
    if isinstance(clients, str):  # whose letters would be as many clients
        raise TypeError(f"clients is the text {clients!r}. Give a list: [{clients!r}].")
    if not clients or "" in clients or len(set(clients)) != len(clients):
        raise ValueError(f"clients are the ids of those that may come, each once and none empty, got {list(clients)}.")


def _listen(server: Any, grpc: Any, address: str, credentials: TlsCredentials | None) -> str:
    """
    Let a gRPC server listen; at which `host:port` it does.

    Raises:
        OSError: If it cannot.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            pair = (credentials.key, credentials.certificate)
            required = grpc.ssl_server_credentials([pair], credentials.authority, require_client_auth=True)
            port = server.add_secure_port(address, required)
    except RuntimeError as error:
        raise OSError(
            f"The server cannot listen at {address}: is the port taken, or the address another machine's? ({error})"
        ) from None
    return f"{host_of(address)}:{port}"
