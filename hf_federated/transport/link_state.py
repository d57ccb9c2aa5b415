"""What the threads of a client's link share: the connection, the calls in flight, and the end of the link."""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

from .connection import Connection
from .errors import LinkError


class LinkState:
    """
    The state of a link.

    Args:
        connection ([`~transport.connection.Connection`]): The connection to the server.

    Attributes:
        lock (`threading.Lock`): Protects the calls, the failure and the connection.
        calls (`dict[int, grpc.Call]`): The call of each message in flight, by message number.
        has_unary_call (`bool`): Whether a unary call is in flight, which only the end of its channel can cancel.
        failure (`tuple[type, str]`, *optional*): Class and text of the error that ended the link.
        closed (`threading.Event`): Set when the link is closed.
        last_active_at (`float`): Time of the latest activity of the server, as `time.monotonic()` returns it.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        self.calls: dict[int, Any] = {}
        self.has_unary_call = False
        self.failure: tuple[type[LinkError], str] | None = None
        self.closed = threading.Event()
        self.last_active_at = time.monotonic()

    def check_usable(self) -> None:
        """
        Raise the failure of the link, if it failed or was closed.

        Raises:
            LinkError: If the link has ended.
        """
        if self.failure is not None:
            kind, text = self.failure
            raise kind(text)

    def fail(self, kind: type[LinkError], text: str) -> tuple[type[LinkError], str]:
        """End the link, cancel the calls of the messages in flight, and return the first error of the link."""
        with self.lock:
            failure = self.failure = self.failure or (kind, text)
            for call in self.calls.values():
                call.cancel()
            if self.has_unary_call:
                self.has_unary_call = False
                self.connection.abandon()
        return failure

    def fail_and_raise(self, kind: type[LinkError], text: str) -> NoReturn:
        """End the link, and raise the first error of the link."""
        first_kind, first_text = self.fail(kind, text)
        raise first_kind(first_text)

    def replace_connection(self) -> None:
        """Replace a connection that is open but transmits no data. The messages in flight are sent again."""
        with self.lock:
            if self.failure is None:
                self.connection.replace()
