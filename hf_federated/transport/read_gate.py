"""`ReadGate`: limits how many large messages of clients are in memory at the same time."""

from __future__ import annotations

import threading
import time

from .errors import RequestRejectedError


class ReadGate:
    """
    Limits how many large messages are in memory. Further messages wait, and their bytes stay on the client.

    Args:
        max_messages (`int`, *optional*, defaults to `1`): Number of large messages.
        min_bytes (`int`, *optional*, defaults to 1 MiB): Smaller messages do not count.
        patience (`float`, *optional*, defaults to `30`): Seconds after which a message no longer counts, so that a
            slow or hostile client does not block the other clients.
    """

    def __init__(self, max_messages: int = 1, min_bytes: int = 1 << 20, patience: float = 30.0) -> None:
        self._max_messages = max_messages
        self._min_bytes = min_bytes
        self._patience = patience
        self._changed = threading.Condition()
        # The time at which each message inside was let in.
        self._entered: dict[str, float] = {}
        self._is_closed = False

    def enter(self, client_id: str, num_bytes: int) -> None:
        """
        Wait until a message of a client may be read. A client that is inside does not wait.

        Args:
            client_id (`str`): Id of the client.
            num_bytes (`int`): Size of the message.

        Raises:
            RequestRejectedError: If the gate is closed.
        """
        if num_bytes < self._min_bytes:
            return
        with self._changed:
            while not self._is_closed and client_id not in self._entered:
                oldest = time.monotonic() - self._patience
                counted = sorted(entered for entered in self._entered.values() if entered > oldest)
                if len(counted) < self._max_messages:
                    break
                self._changed.wait(counted[0] - oldest)
            if self._is_closed:
                raise RequestRejectedError("UNAVAILABLE", "The server stops.")
            self._entered.setdefault(client_id, time.monotonic())

    def leave(self, client_id: str) -> None:
        """Record that the message of a client is no longer in memory."""
        with self._changed:
            self._entered.pop(client_id, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all messages that wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
