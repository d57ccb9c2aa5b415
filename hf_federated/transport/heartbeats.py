"""Heartbeats of a client's link: the server keeps the session, and the link notices an unreachable server."""

from __future__ import annotations

import threading
import time
from typing import Any

from .connection import BUSY, CONNECTION_ERRORS, details_of, status_text
from .errors import ServerUnreachableError, SessionLostError
from .link_state import LinkState


# What the user can do after the link ended.
ADVICE = (
    " It is not known whether the server processed the messages in flight. Create a new link and resume from a "
    "checkpoint."
)


class Heartbeats:
    """
    Sends heartbeats in a thread until the link ends, and ends the link if the server does not answer them.

    Args:
        grpc (`Any`): The module `grpc`.
        state ([`~transport.link_state.LinkState`]): The state of the link.
        address (`str`): Address of the server, for errors.
        session_id (`str`): Id of the session.
        interval (`float`): Seconds between heartbeats.
        reconnect_timeout (`float`): Seconds without activity of the server after which it counts as unreachable.
    """

    def __init__(
        self, grpc: Any, state: LinkState, address: str, session_id: str, interval: float, reconnect_timeout: float
    ) -> None:
        self._grpc = grpc
        self._state = state
        self._address = address
        self._session_id = session_id
        self._interval = interval
        self._reconnect_timeout = reconnect_timeout
        self._thread = threading.Thread(target=self._send, name=f"heartbeat-{address}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Wait until the thread ends, after the link has ended."""
        self._state.connection.cancel_call()
        self._thread.join()

    def unreachable_text(self, error: Any, num_attempts: int, failing_since: float) -> str:
        """
        Return the text of the error for a server that is not active.

        Args:
            error (`grpc.RpcError`): The error of the last attempt.
            num_attempts (`int`): Number of attempts.
            failing_since (`float`): Time of the first failed attempt, as `time.monotonic()` returns it.
        """
        return (
            f"The server at {self._address} was not active for reconnect_timeout={self._reconnect_timeout:g} s: "
            f"{num_attempts} attempts in {time.monotonic() - failing_since:.1f} s failed, over "
            f"{self._state.connection.num_channels} connections. gRPC status: {status_text(error)}.{ADVICE}"
        )

    def _send(self) -> None:
        state, timeout = self._state, self._reconnect_timeout / 3
        failing_since: float | None = None
        num_attempts = 0
        while not state.closed.wait(self._interval) and state.failure is None:
            started_at = time.monotonic()
            try:
                state.connection.call("Heartbeat", {"session": self._session_id}, timeout)
                failing_since, num_attempts, state.last_active_at = None, 0, time.monotonic()
            except self._grpc.FutureCancelledError:
                # The link is being closed.
                return
            except self._grpc.RpcError as error:
                code = error.code().name
                if code not in (*CONNECTION_ERRORS, BUSY, "DEADLINE_EXCEEDED"):
                    state.fail(SessionLostError, f"{self._address}: {details_of(error)}{ADVICE}")
                    return
                if code == BUSY or state.last_active_at > started_at:
                    # The server is alive, but busy or transmitting a large message.
                    failing_since, num_attempts = None, 0
                    continue
                num_attempts += 1
                failing_since = max(started_at if failing_since is None else failing_since, state.last_active_at)
                if time.monotonic() - failing_since > self._reconnect_timeout:
                    state.fail(ServerUnreachableError, self.unreachable_text(error, num_attempts, failing_since))
                    return
                if code == "DEADLINE_EXCEEDED":
                    state.replace_connection()
