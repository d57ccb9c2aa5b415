"""The sessions of the connected clients. A session ends when its client leaves or sends no more heartbeats."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from transformers.utils import logging

from ..security.encrypted_link import ServerEndpoint
from ..utils.printable import printable_traceback
from .errors import RequestRejectedError
from .exactly_once import ExactlyOnceExecutor


logger = logging.get_logger(__name__)


class TransportSession:
    """
    The server's state of a connected client.

    This is the session of the transport. The encrypted session of the client, which has its keys, is a
    [`~hf_federated.security.encrypted_session.ServerSession`].

    Args:
        client_id (`str`): Id of the client.
        session_id (`str`): Random id of the session, which only the client receives.
        process_token (`str`): Random token of the client's link. It distinguishes the links of a client.
        endpoint ([`~hf_federated.security.encrypted_link.ServerEndpoint`]): Answers the messages of the client.

    Attributes:
        executor ([`ExactlyOnceExecutor`]): Processes each message of the session once.
        last_active_at (`float`): Time of the client's last activity, in seconds of `time.monotonic()`.
        end_reason (`str`, *optional*): The reason why the session ended. `None` while the session is open.
    """

    def __init__(self, client_id: str, session_id: str, process_token: str, endpoint: ServerEndpoint) -> None:
        self.client_id = client_id
        self.session_id = session_id
        self.process_token = process_token
        self.endpoint = endpoint
        self.executor = ExactlyOnceExecutor(client_id)
        self.last_active_at = time.monotonic()
        self.end_reason: str | None = None
        self._lock = threading.Lock()
        # Cancels the call of each message in flight, by message number.
        self._cancel_calls: dict[int, Callable[[], object]] = {}

    def record_activity(self) -> None:
        """Record that the client is active: a heartbeat or a part of a message arrived."""
        self.last_active_at = time.monotonic()

    def check_open(self) -> None:
        """
        Check that the session is open.

        Raises:
            RequestRejectedError: If the session ended.
        """
        if self.end_reason is not None:
            raise RequestRejectedError("FAILED_PRECONDITION", self.end_reason)

    @contextlib.contextmanager
    def register_call(self, number: int, cancel: Callable[[], object]) -> Iterator[None]:
        """
        Register a call that transmits a message, for the duration of the context.

        A previous call of the same message is cancelled. The connection of the previous call is broken, so the call
        would wait for the rest of its message, or for an answer that it cannot deliver.

        Args:
            number (`int`): Number of the message.
            cancel (`Callable[[], object]`): Cancels the call.

        Raises:
            RequestRejectedError: If the session ended.
        """
        with self._lock:
            self.check_open()
            cancel_previous = self._cancel_calls.get(number)
            self._cancel_calls[number] = cancel
        if cancel_previous is not None:
            cancel_previous()
        try:
            yield
        finally:
            with self._lock:
                if self._cancel_calls.get(number) is cancel:
                    del self._cancel_calls[number]

    def close(self, reason: str) -> bool:
        """
        End the session and cancel its calls.

        Args:
            reason (`str`): The reason. Later requests of the session receive it as their error.

        Returns:
            `bool`: Whether the session was open.
        """
        with self._lock:
            if self.end_reason is not None:
                return False
            self.end_reason, cancel_calls = reason, list(self._cancel_calls.values())
        for cancel in cancel_calls:
            cancel()
        self.executor.notify_waiters()
        return True


class SessionRegistry:
    """
    The sessions of a server's clients, at most one for each client.

    If a client is inactive for `heartbeat_timeout`, its session ends. The session cannot be resumed, because the other
    clients may have continued without the client. The client must connect again.

    Args:
        clients (`Sequence[str]`): Ids of the clients that may connect.
        heartbeat_timeout (`float`): Seconds without activity after which a session ends.
        on_lost (`Callable[[str], None]`, *optional*): Called with the client id when a session ends by the timeout.

    Example: see [`GrpcServer`].
    """

    def __init__(
        self, clients: Sequence[str], heartbeat_timeout: float, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self.clients = frozenset(clients)
        # One lock for each client. It is held while a session opens or ends and while the callbacks report it, so that
        # the reports arrive in the order of the events.
        self.reporting = {client_id: threading.Lock() for client_id in clients}
        self.heartbeat_timeout = heartbeat_timeout
        self._on_lost = on_lost
        # Prefix of the session ids. It identifies sessions of a previous run of the server.
        self._run_id = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._sessions: dict[str, TransportSession] = {}
        # The reason for each expelled client.
        self._expelled: dict[str, str] = {}
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="session-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread that ends the sessions of inactive clients."""
        self._watcher.start()

    def close(self) -> None:
        """End all sessions, and stop the thread that ends the sessions of inactive clients."""
        self._closed.set()
        if self._watcher.ident is not None:
            self._watcher.join()
        with self._lock:
            sessions = list(self._sessions.values())
        # Messages that wait for earlier messages then end.
        for session in sessions:
            session.close("The server stopped.")

    def open_session(
        self, client_id: str, process_token: str, make_endpoint: Callable[[], ServerEndpoint]
    ) -> tuple[TransportSession, bool]:
        """
        Open a session for a client that connects.

        If the same link connects again, the existing session is returned.

        Args:
            client_id (`str`): Id of the client.
            process_token (`str`): Random token of the client's link.
            make_endpoint (`Callable[[], ServerEndpoint]`): Creates the endpoint of a new session.

        Returns:
            `tuple[TransportSession, bool]`: The session, and whether it is new.

        Raises:
            RequestRejectedError: If another link of the client is connected, or if the client was expelled.
        """
        with self._lock:
            if client_id in self._expelled:
                raise RequestRejectedError("PERMISSION_DENIED", self._expelled[client_id])
            existing = self._sessions.get(client_id)
            if existing is not None and existing.end_reason is None:
                if existing.process_token == process_token:
                    existing.record_activity()
                    return existing, False
                inactive = time.monotonic() - existing.last_active_at
                raise RequestRejectedError(
                    "ALREADY_EXISTS",
                    f"Client {client_id!r} is already connected by another link or process, which was active "
                    f"{inactive:.1f} s ago. Close the other link, or wait until it is inactive for "
                    f"{self.heartbeat_timeout:g} s.",
                )
            session_id = f"{self._run_id}.{secrets.token_hex(16)}"
            session = TransportSession(client_id, session_id, process_token, make_endpoint())
            self._sessions[client_id] = session
            return session, True

    def expel(self, client_id: str, reason: str = "") -> None:
        """End the session of a client for a reason, and refuse the client from now on."""
        reason = reason or f"The operator of the server has expelled client {client_id!r}."
        with self._lock:
            self._expelled[client_id] = reason
            session = self._sessions.get(client_id)
        if session is not None:
            session.close(reason)

    def find(self, session_id: str) -> TransportSession:
        """
        Return the open session with an id.

        Raises:
            RequestRejectedError: If the session ended, or belongs to a previous run of the server.
        """
        with self._lock:
            found = next((session for session in self._sessions.values() if session.session_id == session_id), None)
        if found is None:
            restarted = session_id.partition(".")[0] != self._run_id
            reason = "The server was restarted" if restarted else "The client connected again from another process"
            raise RequestRejectedError("FAILED_PRECONDITION", f"{reason}, so the server does not know this session.")
        found.check_open()
        return found

    def is_alive(self, client_id: str) -> bool:
        """Whether a client is connected and was active within `heartbeat_timeout`."""
        inactive = self.seconds_since_heard(client_id)
        return inactive is not None and inactive <= self.heartbeat_timeout

    def seconds_since_heard(self, client_id: str) -> float | None:
        """Seconds since the last activity of a connected client, or `None` if the client is not connected."""
        with self._lock:
            session = self._sessions.get(client_id)
        if session is None or session.end_reason is not None:
            return None
        return time.monotonic() - session.last_active_at

    def _watch(self) -> None:
        interval = self.heartbeat_timeout / 4
        checked_at = time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            delay, checked_at = now - checked_at - interval, now
            with self._lock:
                sessions = [session for session in self._sessions.values() if session.end_reason is None]
            for session in sessions:
                if delay > interval:
                    # This process was suspended, and heartbeats that arrived in the meantime are not read yet.
                    session.last_active_at = min(session.last_active_at + delay, now)
                if (inactive := now - session.last_active_at) > self.heartbeat_timeout:
                    self._end_inactive(session, inactive)

    def _end_inactive(self, session: TransportSession, inactive: float) -> None:
        reason = (
            f"The server ended the session of client {session.client_id!r}, which was inactive for {inactive:.1f} s."
        )
        with self.reporting[session.client_id]:
            if not session.close(reason):
                return
            logger.warning(reason)
            if self._on_lost is not None:
                try:
                    self._on_lost(session.client_id)
                # An error of the callback must not end this thread, which watches all clients.
                except Exception as error:
                    text = printable_traceback(error)
                    logger.error(f"on_lost failed for client {session.client_id!r}.\n{text}")
