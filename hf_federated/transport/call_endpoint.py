"""`CallEndpoint`: the client's end of a [`CallTransport`]."""

from __future__ import annotations

import threading
import uuid
from typing import Any

from ..utils.printable import printable
from ..utils.untrusted_json import parse_json
from .base import Connection
from .call_transport import CALL_FIELDS, LARGE_REPLY_BYTES
from .errors import ClientRefusedError, LinkError
from .framing import frame, unframe
from .session_config import SessionConfig, format_differences


_MAX_WAIT_SECONDS = 60.0


def _answer(kind: str, session: str = "", text: str = "", settings: dict[str, Any] | None = None) -> bytes:
    return frame({"kind": kind, "session": session, "text": text, "settings": settings or {}})


class CallEndpoint:
    """
    Answers the calls of a [`CallTransport`], while a trainer runs in another thread.

    Pass `connect` to `FederatedTrainer.join_over()`, and call `handle` with each call of the server.
    The calls may arrive before the trainer connects, in any order, repeatedly and concurrently.

    Example: see [`CallTransport`].
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._connection: _CallConnection | None = None
        self._failure: str | None = None
        self._is_closed = False

    def connect(self, session_config: SessionConfig, announcement: bytes) -> Connection:
        """
        Wait until the server accepts the client.

        Args:
            session_config ([`SessionConfig`]): Settings that the client must share with the server.
            announcement (`bytes`): What the client announces.

        Raises:
            ClientRefusedError: If the server refuses the client.
            LinkError: If the endpoint closes.
        """
        with self._changed:
            if self._is_closed:
                raise LinkError("The server has ended the connection.")
            self._connection = connection = _CallConnection(session_config, announcement)
            self._changed.notify_all()
        connection.wait_until_accepted()
        return connection

    def handle(self, request: bytes) -> bytes:
        """
        Answer a call of the server.

        Args:
            request (`bytes`): The call.

        Raises:
            ValueError: If the call is damaged.
        """
        header, content = unframe(request, **CALL_FIELDS)
        header["seconds"] = min(max(header["seconds"], 0.0), _MAX_WAIT_SECONDS)
        with self._changed:
            if header["kind"] == "join":
                self._changed.wait_for(self._is_ready, header["seconds"])
            if self._failure is not None:
                return _answer("failed", text=self._failure)
            if self._connection is None or self._connection.is_closed:
                return _answer("wait" if header["kind"] == "join" else "lost")
        return self._connection.handle(header, content)

    def _is_ready(self) -> bool:
        return self._failure is not None or (self._connection is not None and not self._connection.is_closed)

    def fail(self, reason: str) -> None:
        """
        Answer all further calls with a failure.

        Args:
            reason (`str`): Why the trainer ended.
        """
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def close(self) -> None:
        """End the connection: a trainer that waits for a request ends with a `LinkError`."""
        with self._changed:
            self._is_closed = True
        if self._connection is not None:
            self._connection.close()


class _CallConnection(Connection):
    """
    The connection of a trainer.

    Args:
        session_config ([`SessionConfig`]): Settings that the client must share with the server.
        announcement (`bytes`): What the client announces.

    Attributes:
        is_closed (`bool`): Whether the connection is closed.
    """

    def __init__(self, session_config: SessionConfig, announcement: bytes) -> None:
        self._session_config = session_config
        self._announcement = announcement
        self._session = uuid.uuid4().hex
        self._changed = threading.Condition()
        # `None` until the server has decided. Empty if it accepted the client, otherwise why it refused the client.
        self._refusal: str | None = None
        self.is_closed = False
        # The last request that arrived, its content until the trainer takes it, and the reply of the trainer.
        self._name = ""
        self._content: memoryview | None = None
        self._reply: bytes | None = None
        # The request that the trainer works on.
        self._taken = ""

    # ---- Thread of the trainer

    def wait_until_accepted(self) -> None:
        """Wait until the server accepts or refuses the client."""
        with self._changed:
            self._changed.wait_for(lambda: self._refusal is not None or self.is_closed)
        if self.is_closed:
            raise LinkError("The server ended the connection before it accepted the client.")
        if self._refusal:
            raise ClientRefusedError(f"The server refused the client: {printable(self._refusal)}")

    def receive(self, reply: bytes | None = None) -> memoryview | None:
        with self._changed:
            if reply is not None and self._taken == self._name:
                self._reply = reply
                self._changed.notify_all()
            del reply
            self._changed.wait_for(lambda: self._content is not None or self.end is not None or self.is_closed)
            if self.end is not None:
                return None
            if self._content is None:
                raise LinkError("The server has ended the connection.")
            content, self._content, self._taken = self._content, None, self._name
            return content

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    # ---- Threads of the calls

    def handle(self, header: dict[str, Any], content: memoryview) -> bytes:
        """Answer a call."""
        kind = header["kind"]
        with self._changed:
            if kind == "join":
                return _answer("joined", self._session, settings=self._session_config.to_dict()) + self._announcement
            if header["session"] != self._session or self.is_closed:
                return _answer("lost")
            if kind in ("accept", "refuse"):
                self._refusal = header["text"] if kind == "refuse" else self._compare(content)
            elif kind == "end":
                self.end = header["text"]
            else:
                return self._exchange(kind, header, content)
            self._changed.notify_all()
            return _answer("done")

    def _compare(self, terms: memoryview) -> str:
        """Compare the settings of the server. Return why the client refuses the server, or an empty text."""
        try:
            differences = self._session_config.differences(parse_json(terms), is_client=True)
        except ValueError as error:
            differences = [str(error)]
        if not differences:
            return ""
        return f"The client refuses the server, which has different settings. {format_differences(differences)}."

    def _exchange(self, kind: str, header: dict[str, Any], content: memoryview) -> bytes:
        """Take a request, unless it is repeated, and wait for the reply."""
        name = header["name"]
        if kind == "request" and name != self._name:
            self._name, self._content, self._reply = name, content, None
            self._changed.notify_all()
        self._changed.wait_for(lambda: self._is_answerable(name), header["seconds"])
        if self.is_closed or name != self._name:
            return _answer("lost")
        if self._reply is None:
            return _answer("wait")
        if len(self._reply) >= LARGE_REPLY_BYTES and kind != "fetch":
            return _answer("large")
        return _answer("reply") + self._reply

    def _is_answerable(self, name: str) -> bool:
        return self._reply is not None or name != self._name or self.end is not None or self.is_closed
