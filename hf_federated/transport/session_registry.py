"""Which clients are there: from their connecting until they leave, or are not heard for too long."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from transformers.utils import logging

from ..security.encrypted_link import ServerEndpoint
from .errors import RequestRejectedError
from .exactly_once import ExactlyOnceExecutor


logger = logging.get_logger(__name__)


class ClientSession:
    """
    What the server keeps of one client's link. Not to be confused with the keys of an encrypted one.

    Args:
        client_id (`str`): Whose it is.
        session (`str`): Its name, which only the client is told.
        process (`str`): Which of the client's links it is.
        end ([`ServerEndpoint`]): What answers its messages.
    """

    def __init__(self, client_id: str, session: str, process: str, end: ServerEndpoint) -> None:
        self.client_id = client_id
        self.session = session
        self.process = process
        self.end = end
        self.once = ExactlyOnceExecutor(client_id)
        self.heard_at = time.monotonic()
        # Why the server takes no more of it.
        self.ended: str | None = None
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None

    def hear(self) -> None:
        """The client gave a sign of life."""
        self.heard_at = time.monotonic()

    def check_goes_on(self) -> None:
        """
        Raises:
            RequestRejectedError: If the session ended.
        """
        if self.ended is not None:
            raise RequestRejectedError("FAILED_PRECONDITION", self.ended)

    @contextlib.contextmanager
    def newest_call(self, cancel: Callable[[], object]) -> Iterator[None]:
        """
        A call that brings a message, as long as it is looked after. One before it is cancelled: its connection broke,
        and it would wait for the rest of its message, or for an answer that nobody takes.

        Args:
            cancel (`Callable[[], None]`): Cancels it.

        Raises:
            RequestRejectedError: If the session ended.
        """
        with self._lock:
            self.check_goes_on()
            before, self._cancel = self._cancel, cancel
        if before is not None:
            before()
        try:
            yield
        finally:
            with self._lock:
                if self._cancel is cancel:
                    self._cancel = None

    def close(self, reason: str) -> bool:
        """Take no more of it, and cancel its call; whether it went on until then."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended, cancel = reason, self._cancel
        if cancel is not None:
            cancel()
        self.once.wake()
        return True


class SessionRegistry:
    """
    The sessions of a server's clients, one each.

    A client that was not heard for `heartbeat_timeout` is lost, once and for all: what others did without it cannot be
    undone, so its session ends and it has to connect anew.

    Args:
        clients (`Sequence[str]`): Who may come.
        heartbeat_timeout (`float`): Seconds.
        on_lost (`Callable[[str], None]`, *optional*): Called with the id of a client that was lost.

    Example: see [`SplitServer`], which has one.
    """

    def __init__(
        self, clients: Sequence[str], heartbeat_timeout: float, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self.clients = frozenset(clients)
        self.heartbeat_timeout = heartbeat_timeout
        self._on_lost = on_lost
        # Sessions of an earlier run of the server begin otherwise.
        self._run = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._sessions: dict[str, ClientSession] = {}
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="split-presence", daemon=True)

    def start(self) -> None:
        """Begin to watch for lost clients."""
        self._watcher.start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()
        if self._watcher.ident is not None:
            self._watcher.join()

    def admit(
        self, client_id: str, process: str, make_end: Callable[[], ServerEndpoint]
    ) -> tuple[ClientSession, bool]:
        """
        A session for a client that connects, and whether it is new. The same link that asks again gets the same one.

        Raises:
            RequestRejectedError: If another link of the client is in use.
        """
        with self._lock:
            before = self._sessions.get(client_id)
            if before is not None and before.ended is None:
                if before.process == process:
                    before.hear()
                    return before, False
                silent = time.monotonic() - before.heard_at
                raise RequestRejectedError(
                    "ALREADY_EXISTS",
                    f"Client {client_id!r} is connected already, by another link or process that was heard "
                    f"{silent:.1f} s ago. Close that one; it counts as lost after {self.heartbeat_timeout:g} s of "
                    "silence.",
                )
            name = f"{self._run}.{secrets.token_hex(16)}"
            admitted = self._sessions[client_id] = ClientSession(client_id, name, process, make_end())
            return admitted, True

    def find(self, session: str) -> ClientSession:
        """
        The session of that name.

        Raises:
            RequestRejectedError: If it ended, or is none of this run of the server.
        """
        with self._lock:
            found = next((own for own in self._sessions.values() if own.session == session), None)
        if found is None:
            began_anew = session.partition(".")[0] != self._run
            reason = "The server was started anew" if began_anew else "The client connected anew from another process"
            raise RequestRejectedError("FAILED_PRECONDITION", f"{reason}, and does not know this session.")
        found.check_goes_on()
        return found

    def is_alive(self, client_id: str) -> bool:
        """Whether a client is connected and was heard within the timeout."""
        silent = self.seconds_since_heard(client_id)
        return silent is not None and silent <= self.heartbeat_timeout

    def seconds_since_heard(self, client_id: str) -> float | None:
        """How long a client that is connected was not heard; `None` of one that is not."""
        with self._lock:
            session = self._sessions.get(client_id)
        return None if session is None or session.ended is not None else time.monotonic() - session.heard_at

    def _watch(self) -> None:
        interval = self.heartbeat_timeout / 4
        looked_at = time.monotonic()
        while not self._closed.wait(interval):
            now = time.monotonic()
            late, looked_at = now - looked_at - interval, now
            with self._lock:
                sessions = [session for session in self._sessions.values() if session.ended is None]
            for session in sessions:
                if late > interval:
                    # This process stood still, and whatever clients sent meanwhile is still to be read.
                    session.heard_at = min(session.heard_at + late, now)
                silent = now - session.heard_at
                if silent > self.heartbeat_timeout:
                    self._lose(session, silent)

    def _lose(self, session: ClientSession, silent: float) -> None:
        reason = f"The server gave {session.client_id!r} up, which it had not heard for {silent:.1f} s."
        if not session.close(reason):
            return
        logger.warning(reason)
        if self._on_lost is not None:
            try:
                self._on_lost(session.client_id)
            # Whatever it raises, the others are still to be watched.
            except Exception:
                logger.exception(f"on_lost failed for {session.client_id!r}.")
