"""`CallTransport`: a federation over remote calls, for systems in which only the server starts an exchange.

The server calls one function of each client with bytes, and the function returns bytes. [`CallEndpoint`] answers the
calls at the client.

| call of the server | answer of the client |
|---|---|
| `join` | `joined` with the settings and the announcement, `wait`, or `failed` with the reason |
| `accept`, or `refuse` with the reason | `done` |
| `request`, then `poll` until there is a reply | `reply`, `large` for a reply to fetch, `wait`, or `lost` |
| `fetch` | `reply` |
| `end` with the reason | `done` |

A call returns after a third of `call_timeout` at the latest, also if the client trains for hours. A client that does
not respond is therefore lost after `call_timeout`. The server tries again to reach a lost client.
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers.utils import logging

from ..utils.arguments import require
from ..utils.printable import printable
from .base import Event, Transport
from .errors import RequestRejectedError
from .event_queue import EventQueue
from .framing import frame, unframe
from .protocol import Pieces
from .read_gate import ReadGate
from .session_config import SessionConfig, format_differences


logger = logging.get_logger(__name__)

# Calls the function of a client: `call(request, timeout)` returns the answer, or raises an error.
Call = Callable[[bytes, float], bytes]

CALL_FIELDS: dict[str, Any] = {"kind": str, "session": str, "name": str, "text": str, "seconds": float}
ANSWER_FIELDS: dict[str, Any] = {"kind": str, "session": str, "text": str, "settings": dict}
# The server fetches larger replies one at a time.
LARGE_REPLY_BYTES = 1 << 20

_CHECK_SECONDS = 1.0
# Seconds between two attempts to reach a lost client.
_FIRST_PAUSE, _LAST_PAUSE = 0.2, 10.0
# Seconds that the server waits for the clients to learn that the run has ended.
_FAREWELL_SECONDS = 10.0


class _CallFailedError(Exception):
    """A client does not take part. The message is for the log."""


class _TrainerFailedError(_CallFailedError):
    """The trainer of a client has ended, or the server has refused it."""


@dataclass
class _Client:
    """
    The server's state of a client.

    Args:
        call (`Callable`): Calls the function of the client.
        session (`str`): Id of the client's process. Empty if the client is not connected.
        build (`Callable`, *optional*): Builds the open request.
        name (`str`): Name of the open request. A repeated request has the same name.
        has_joined (`bool`): Whether the client has ever joined.
        is_expelled (`bool`): Whether the client must not take part.
        heard (`float`): When the client last answered a call.
    """

    call: Call
    session: str = ""
    build: Callable[[], bytes | Pieces] | None = None
    name: str = ""
    has_joined: bool = False
    is_expelled: bool = False
    heard: float = 0.0


def _check_answer(answer: dict[str, Any], kind: str) -> None:
    if answer["kind"] == "failed":
        raise _TrainerFailedError(f"its trainer ended: {printable(answer['text'])}")
    if answer["kind"] == "lost":
        raise _CallFailedError("it was restarted")
    if answer["kind"] != kind:
        raise _CallFailedError(f"it answered {answer['kind']!r} and not {kind!r}")


class CallTransport(Transport):
    """
    A transport over remote calls to the clients.

    Args:
        calls (`Mapping[str, Callable[[bytes, float], bytes]]`):
            Calls the function of a client, by client id. `call(request, timeout)` returns the answer. It raises an
            error if the client did not respond within `timeout` seconds or the call failed. The transport calls from
            one thread for each client.
        call_timeout (`float`, *optional*, defaults to `60`):
            Seconds without a response after which a client is lost. It does not limit the duration of local training.
        check (`Callable[[], None]`, *optional*):
            Called regularly by `receive`. An error that it raises ends the run.

    Attributes:
        failures (`dict[str, str]`): Why the trainers of clients ended before the clients joined, by client id.

    Raises:
        ValueError: If `call_timeout` is not positive.

    Example:

    ```python
    >>> from hf_federated.engines import NetworkEngine
    >>> from hf_federated.transport import CallEndpoint, CallTransport

    >>> endpoint = CallEndpoint()  # at the client, where the trainer uses endpoint.connect
    >>> transport = CallTransport({"north": lambda request, timeout: endpoint.handle(request)})
    >>> engine = NetworkEngine(["north"], transport=transport)
    ```
    """

    def __init__(
        self, calls: Mapping[str, Call], *, call_timeout: float = 60.0, check: Callable[[], None] | None = None
    ) -> None:
        require("call_timeout", call_timeout, call_timeout > 0, "positive")
        self._calls = dict(calls)
        self._call_timeout = call_timeout
        self._check = check
        self.failures: dict[str, str] = {}
        self._session_config: SessionConfig
        self._clients: dict[str, _Client] = {}
        # Wakes the threads of the clients.
        self._changed = threading.Condition()
        self._end: str | None = None
        self._events = EventQueue(ReadGate(min_bytes=LARGE_REPLY_BYTES))

    def start(self, client_ids: Sequence[str], session_config: SessionConfig) -> None:
        absent = [client_id for client_id in client_ids if client_id not in self._calls]
        if absent:
            logger.warning(f"Clients {absent} do not take part in the run: they cannot be called.")
        self._session_config, self._end, self.failures = session_config, None, {}
        self._events = EventQueue(ReadGate(min_bytes=LARGE_REPLY_BYTES))
        self._clients = {
            client_id: _Client(call) for client_id, call in self._calls.items() if client_id in client_ids
        }
        for client_id in self._clients:
            threading.Thread(target=self._serve, args=[client_id], name=f"client {client_id}", daemon=True).start()

    def send(self, client_id: str, build: Callable[[], bytes | Pieces]) -> None:
        if client_id not in self._clients:
            return
        with self._changed:
            client = self._clients[client_id]
            client.build, client.name = build, uuid.uuid4().hex
            self._changed.notify_all()

    def withdraw(self, client_id: str) -> None:
        if client_id in self._clients:
            with self._changed:
                self._clients[client_id].build, self._clients[client_id].name = None, ""

    def receive(self, timeout: float | None) -> Event | None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if self._check is not None:
                self._check()
            remaining = max(deadline - time.monotonic(), 0)
            event = self._events.receive(min(remaining, _CHECK_SECONDS))
            if event is not None or time.monotonic() >= deadline:
                return event

    def is_connected(self, client_id: str) -> bool:
        return client_id in self._clients and bool(self._clients[client_id].session)

    def seconds_since_heard(self, client_id: str) -> float | None:
        return time.monotonic() - self._clients[client_id].heard if self.is_connected(client_id) else None

    def expel(self, client_id: str, reason: str = "") -> None:
        self.withdraw(client_id)
        client = self._clients.get(client_id)
        if client is None:
            return
        with self._changed:
            client.is_expelled = True
            self._changed.notify_all()
        if client.session:
            self._dismiss(client, reason or "the server expelled the client")
            self._lose(client_id, client, "left")

    def stop(self, reason: str = "") -> None:
        with self._changed:
            self._end = reason
            self._changed.notify_all()
        self._events.gate.close()
        threads = [self._dismiss(client, reason) for client in self._clients.values() if client.session]
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))

    # ---- Threads of the clients

    def _serve(self, client_id: str) -> None:
        """Serve one client until the run ends."""
        client, pause, logged = self._clients[client_id], _FIRST_PAUSE, ""
        while not self._is_over(client):
            try:
                if client.session:
                    self._deliver(client_id, client)
                else:
                    self._join(client_id, client)
                if client.session:
                    pause, logged = _FIRST_PAUSE, ""
            except RequestRejectedError:
                return  # The transport stops.
            except Exception as error:
                # The system that carries the calls defines the errors.
                text = printable(error) or type(error).__name__
                if text != logged and not self._is_over(client):
                    logger.warning(f"Client {client_id!r} cannot be reached: {text}")
                logged = text
                if isinstance(error, _TrainerFailedError) and not client.has_joined:
                    self.failures.setdefault(client_id, text)
                self._lose(client_id, client, "lost")
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over(client), pause)
                pause = min(2 * pause, _LAST_PAUSE)

    def _is_over(self, client: _Client) -> bool:
        return self._end is not None or client.is_expelled

    def _call(
        self, client: _Client, kind: str, content: bytes | Pieces = b"", **fields: str
    ) -> tuple[dict[str, Any], memoryview]:
        """Call the function of a client, and return the header and the content of its answer."""
        header = {"kind": kind, "session": client.session, "name": "", "text": "", **fields}
        pieces = [content] if isinstance(content, bytes) else content
        request = b"".join([frame({**header, "seconds": self._call_timeout / 3}), *pieces])
        answer = unframe(client.call(request, self._call_timeout), **ANSWER_FIELDS)
        client.heard = time.monotonic()
        return answer

    def _join(self, client_id: str, client: _Client) -> None:
        """Compare the settings of a client that is ready, and accept or refuse it."""
        answer, announcement = self._call(client, "join")
        if answer["kind"] == "wait":
            with self._changed:
                self._changed.wait_for(lambda: self._is_over(client), _FIRST_PAUSE)
            return
        _check_answer(answer, "joined")
        session = answer["session"]
        try:
            differences = self._session_config.differences(answer["settings"])
        except ValueError as error:
            differences = [str(error)]
        if differences:
            text = f"The settings differ. {format_differences(differences)}"
            self._call(client, "refuse", session=session, text=text)
            raise _TrainerFailedError(f"it was refused. {text}")
        terms = json.dumps(self._session_config.to_dict()).encode()
        answer, _ = self._call(client, "accept", terms, session=session)
        _check_answer(answer, "done")
        with self._changed:
            if self._is_over(client):
                return
            client.session, client.has_joined = session, True
        self.failures.pop(client_id, None)
        self._events.put(Event("joined", client_id, bytes(announcement)))

    def _deliver(self, client_id: str, client: _Client) -> None:
        """Wait for the next request to a client, send it, and wait for the reply."""
        with self._changed:
            self._changed.wait_for(lambda: client.build is not None or self._is_over(client))
            build, name = client.build, client.name
        if build is None or self._is_over(client):
            return
        answer, reply = self._call(client, "request", build(), name=name)
        while answer["kind"] == "wait" and client.name == name and not self._is_over(client):
            answer, reply = self._call(client, "poll", name=name)
        is_withdrawn = client.name != name
        if answer["kind"] == "wait" or (answer["kind"] == "large" and is_withdrawn) or self._is_over(client):
            return
        if answer["kind"] == "large":
            self._events.gate.enter(client_id, LARGE_REPLY_BYTES)
            try:
                answer, reply = self._call(client, "fetch", name=name)
                _check_answer(answer, "reply")
            except Exception:
                self._events.gate.leave(client_id)
                raise
        _check_answer(answer, "reply")
        self._take_reply(client_id, client, name, reply)

    def _take_reply(self, client_id: str, client: _Client, name: str, reply: memoryview) -> None:
        with self._changed:
            is_open = client.name == name
            if is_open:
                client.build, client.name = None, ""
        if is_open:
            self._events.put(Event("reply", client_id, reply))
        else:
            self._events.gate.leave(client_id)
            logger.warning(f"Ignored a reply of client {client_id!r}: it came too late.")

    def _lose(self, client_id: str, client: _Client, kind: Literal["left", "lost"]) -> None:
        with self._changed:
            was_connected, client.session = bool(client.session), ""
        if was_connected:
            self._events.put(Event(kind, client_id))

    def _dismiss(self, client: _Client, reason: str) -> threading.Thread:
        """Tell a client in a thread that the run has ended."""

        def dismiss(session: str) -> None:
            try:
                self._call(client, "end", session=session, text=reason)
            # The system that carries the calls defines the errors.
            except Exception as error:
                logger.warning(f"The end of the run did not reach a client: {printable(error)}")

        thread = threading.Thread(target=dismiss, args=[client.session], daemon=True)
        thread.start()
        return thread
