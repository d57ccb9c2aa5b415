"""A client's connection to a server over gRPC: a channel that can be replaced, and the calls of the session."""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

from transformers.utils import logging

from ..utils.printable import printable
from .credentials import TlsCredentials
from .errors import ClientRefusedError, ServerUnreachableError
from .protocol import EXCHANGE_SMALL, SERVICE, VERSION, ConnectResponse
from .session_config import SessionConfig, format_differences


logger = logging.get_logger(__name__)

# Status codes of a failed connection, which do not depend on the message. INTERNAL means that a stream was reset.
CONNECTION_ERRORS = frozenset({"CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN"})
BUSY = "RESOURCE_EXHAUSTED"
# Seconds between attempts.
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
# Shortest interval between two pings that a server permits.
MIN_PING_MS = 500
# If gRPC does not end a call this many seconds after the timeout of the call, gRPC will never end the call.
_GRACE = 2.0


class Connection:
    """
    A connection of one client to a server. It does not repeat calls, except the first one.

    Args:
        grpc (`Any`): The module `grpc`.
        address (`str`): Address of the server, as `host:port`.
        credentials ([`TlsCredentials`], *optional*): Credentials of the client. `None` uses no TLS.
        client_id (`str`): Id of the client.
        reconnect_timeout (`float`): Seconds within which a connection that transmits nothing must end.

    Attributes:
        channel (`grpc.Channel`): The current channel.
        exchange_small (`Callable`): Sends a small message over the current channel, and returns the response.
        num_channels (`int`): Number of channels so far.
    """

    def __init__(
        self, grpc: Any, address: str, credentials: TlsCredentials | None, client_id: str, reconnect_timeout: float
    ) -> None:
        self._grpc = grpc
        self._address = address
        self._credentials = credentials
        self._client_id = client_id
        # The latest unary call.
        self._call: Any = None
        self._reconnect_timeout = reconnect_timeout
        self.num_channels = 0
        self._open()

    def _open(self) -> None:
        self.channel = create_channel(self._grpc, self._address, self._credentials, self._reconnect_timeout)
        self.exchange_small = self.channel.unary_unary(f"/{SERVICE}/{EXCHANGE_SMALL}")
        self.num_channels += 1

    def replace(self) -> None:
        """Close the channel, which ends its calls, and create another one."""
        self.channel.close()
        self._open()

    def abandon(self) -> None:
        """
        Create another channel, and close the previous one in a thread.

        An interrupt inside gRPC can leave a lock of the channel held, on which `close` would wait forever.
        """
        threading.Thread(target=self.channel.close, name="close of an interrupted channel", daemon=True).start()
        self._open()

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()

    def call(self, method: str, request: dict[str, Any], timeout: float) -> bytes:
        """
        Call a unary method of the server.

        Args:
            method (`str`): The method.
            request (`dict[str, Any]`): The request, which is sent as JSON.
            timeout (`float`): Seconds to wait for the response.

        Raises:
            grpc.RpcError: If the call fails.
        """
        start = self.channel.unary_unary(f"/{SERVICE}/{method}").future
        self._call = start(json.dumps(request).encode(), timeout=timeout)
        try:
            answer: bytes = self._call.result(timeout + _GRACE)
        except self._grpc.FutureTimeoutError:
            self._call.cancel()
            raise local_error(
                self._grpc, "DEADLINE_EXCEEDED", "gRPC did not end the call within its timeout."
            ) from None
        return answer

    def cancel_call(self) -> None:
        """Cancel the latest unary call, if it has not ended."""
        self._call.cancel()

    def open_session(self, session_config: SessionConfig, connect_timeout: float) -> ConnectResponse:
        """
        Open a session. The server may still be starting.

        Args:
            session_config ([`SessionConfig`]): Settings that the client must share with the server.
            connect_timeout (`float`): Seconds to try to connect.

        Raises:
            ServerUnreachableError: If the server does not respond, TLS fails, or the server is another program.
            ClientRefusedError: If the server refuses the client.
        """
        request = {
            "version": VERSION,
            "client_id": self._client_id,
            "process": secrets.token_hex(16),
            "terms": session_config.to_dict(),
        }
        # A firewall can hold a connection that is open, so the next attempt has a new one.
        attempt_timeout = self._reconnect_timeout / 3
        deadline = time.monotonic() + connect_timeout
        num_attempts = 0
        is_logged = False
        waits = pauses()
        while True:
            pause = next(waits)
            num_attempts += 1
            try:
                timeout = min(max(deadline - time.monotonic(), 0.01), attempt_timeout)
                response = ConnectResponse.from_json(self.call("Connect", request, timeout))
                differences = session_config.differences(response.terms, is_client=True)
                if not differences:
                    return response
                raise ClientRefusedError(
                    f"Client {self._client_id!r} refuses the server at {self._address}, which has different settings. "
                    f"{printable(format_differences(differences))}."
                )
            except self._grpc.RpcError as error:
                code = error.code().name
                if code == "DEADLINE_EXCEEDED":
                    self.replace()
                is_final = time.monotonic() + pause > deadline or "CERTIFICATE_VERIFY_FAILED" in str(error.details())
                if code == "UNIMPLEMENTED":
                    raise self._wrong_server_error(code) from None
                if code in (*CONNECTION_ERRORS, "DEADLINE_EXCEEDED") and is_final:
                    text = self._no_connection_text(error, connect_timeout, num_attempts)
                    raise ServerUnreachableError(text) from None
                if code not in (*CONNECTION_ERRORS, "DEADLINE_EXCEEDED", "ALREADY_EXISTS", BUSY) or is_final:
                    raise ClientRefusedError(f"{self._address}: {details_of(error)}") from None
                if not is_logged:
                    is_logged = True
                    self._log_waiting(error, connect_timeout)
            except ValueError as error:
                raise self._wrong_server_error(error) from None
            time.sleep(pause)

    def _log_waiting(self, error: Any, connect_timeout: float) -> None:
        """Log that the client waits for the server, which may still be starting."""
        reason = printable(status_text(error), 200)
        logger.warning(
            f"Client {self._client_id!r} waits for the server at {self._address}, at most {connect_timeout:.0f} s "
            f"({reason}).",
            extra={"event": "waiting", "client": self._client_id},
        )

    def _wrong_server_error(self, reason: object) -> ServerUnreachableError:
        return ServerUnreachableError(
            f"The server at {self._address} is not a server of hf-federated ({printable(reason, 500)}). Check the "
            "address."
        )

    def _no_connection_text(self, error: Any, connect_timeout: float, num_attempts: int) -> str:
        return (
            f"{self._client_id!r} got no connection to {self._address} within {connect_timeout:g} s, in "
            f"{num_attempts} attempts. Check that the server runs at this address, that no firewall between the two "
            "holds connections, that the server's certificate contains this host name, that both certificates are "
            "signed by the authority that the other party was given, and that the certificates have not expired. "
            f"gRPC status: {status_text(error)}"
        )


def keepalive_options(seconds: float) -> list[tuple[str, int]]:
    """
    Return the options of gRPC that end a connection whose other end does not answer pings, also without calls.

    Args:
        seconds (`float`): Seconds until a connection ends that transmits nothing. After a third of it, a ping is sent.
    """
    milliseconds = max(int(seconds * 1000 / 3), MIN_PING_MS)
    return [
        ("grpc.keepalive_time_ms", milliseconds),
        # On a slow link, the answer to a ping waits behind a message. Recent versions of gRPC use the second option.
        ("grpc.keepalive_timeout_ms", 2 * milliseconds),
        ("grpc.http2.ping_timeout_ms", 2 * milliseconds),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(heartbeat_timeout: float, max_streams: int) -> list[tuple[str, int]]:
    """
    Return the options of a server of gRPC that bound what a connection can hold.

    Args:
        heartbeat_timeout (`float`): Seconds without activity after which a client is lost.
        max_streams (`int`): Number of concurrent calls of a connection.
    """
    return [
        # Without this option, a second server could use the same port and receive some of the clients.
        ("grpc.so_reuseport", 0),
        # A connection that does not complete its TLS handshake ends after this time.
        ("grpc.server_handshake_timeout_ms", 10_000),
        # Clients send heartbeats. A connection without calls is not the connection of a client.
        ("grpc.max_connection_idle_ms", int(max(2 * heartbeat_timeout, 10.0) * 1000)),
        ("grpc.max_concurrent_streams", max_streams),
        # A connection whose other end vanished ends within the heartbeat timeout.
        *keepalive_options(heartbeat_timeout),
        # Clients send pings too, and `reconnect_timeout` of a client decides how often.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS // 2),
    ]


def create_channel(grpc: Any, address: str, credentials: TlsCredentials | None, reconnect_timeout: float) -> Any:
    """
    Create a channel that does not repeat calls.

    Args:
        grpc (`Any`): The module `grpc`.
        address (`str`): Address of the server, as `host:port`.
        credentials ([`TlsCredentials`], *optional*): Credentials of the client. `None` uses no TLS.
        reconnect_timeout (`float`): Seconds within which a connection that transmits nothing must end.

    Returns:
        `grpc.Channel`: The channel.
    """
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
        *keepalive_options(reconnect_timeout),
    ]
    if credentials is None:
        return grpc.insecure_channel(address, options)
    tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.secure_channel(address, tls, options)


def pauses() -> Iterator[float]:
    """Yield the seconds to wait between attempts. They double each time and are random, to spread the clients."""
    generator, longest = random.Random(), _FIRST_PAUSE
    while True:
        yield longest * generator.uniform(0.5, 1)
        longest = min(2 * longest, _LONGEST_PAUSE)


def status_text(error: Any) -> str:
    """Return the status code and the details of a `grpc.RpcError`."""
    return f"{error.code().name}: {details_of(error)}"


def details_of(error: Any) -> str:
    """Return the details of a `grpc.RpcError`, which the server may have written, for a log or an error."""
    return printable(error.details())


def local_error(grpc: Any, code: str, details: str) -> Any:
    """
    Return an error for a call to which gRPC gives none.

    Args:
        grpc (`Any`): The module `grpc`.
        code (`str`): Name of the status code.
        details (`str`): The details of the status.

    Returns:
        `grpc.RpcError`: The error.
    """

    class LocalError(grpc.RpcError):
        def code(self) -> Any:
            return grpc.StatusCode[code]

        def details(self) -> str:
            return details

    return LocalError()
