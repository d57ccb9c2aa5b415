"""`ReadGate`: limits how many large messages of clients are in memory at the same time."""

from __future__ import annotations

import threading

from .errors import RequestRejectedError


class ReadGate:
    """
    Limits how many large messages are in memory. Further messages wait, and their bytes stay on the client.

    Args:
        max_messages (`int`, *optional*, defaults to `1`): Number of large messages.
        min_bytes (`int`, *optional*, defaults to 1 MiB): Smaller messages do not count.
    """

    def __init__(self, max_messages: int = 1, min_bytes: int = 1 << 20) -> None:
        self._max_messages = max_messages
        self._min_bytes = min_bytes
        self._changed = threading.Condition()
        self._holders: set[str] = set()
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
            while client_id not in self._holders and len(self._holders) >= self._max_messages and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                raise RequestRejectedError("UNAVAILABLE", "The server stops.")
            self._holders.add(client_id)

    def leave(self, client_id: str) -> None:
        """Record that the message of a client is no longer in memory."""
        with self._changed:
            self._holders.discard(client_id)
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all messages that wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
