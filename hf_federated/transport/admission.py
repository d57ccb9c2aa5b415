"""
Admission of calls: which clients may call, how many calls a client may have, and how long a call may stay silent.

A stranger must not take what the clients need: threads, slots, and the log. The common name of the certificate decides
before any byte of a message is read. gRPC shows the certificate to a handler only, not to a `ServerInterceptor`, so
each handler asks [`Admission`] first. A refused call holds its thread for less than a millisecond.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from transformers.utils import logging

from ..utils.printable import printable
from .errors import RequestRejectedError


logger = logging.get_logger(__name__)

T = TypeVar("T")

# Seconds between two log entries about one common name.
_LOG_INTERVAL = 600.0
# Strangers beyond this number share a log entry, so that the memory stays bounded.
_MAX_LOGGED_NAMES = 100
_MAX_NAME_CHARACTERS = 64


class Admission:
    """
    Admits the calls of known clients, up to a number of concurrent calls for each client.

    Args:
        clients (`Collection[str]`): Ids of the clients that may call.
        calls_per_client (`int`): Number of concurrent calls of one client.

    Example:

    ```python
    >>> from hf_federated.transport.admission import Admission

    >>> admission = Admission(["north"], calls_per_client=1)
    >>> with admission.admit("north"):
    ...     with admission.admit("north"):
    ...         pass
    Traceback (most recent call last):
    hf_federated.transport.errors.RequestRejectedError: Client 'north' has 1 calls in progress, the maximum...
    ```
    """

    def __init__(self, clients: Collection[str], calls_per_client: int) -> None:
        self._clients = frozenset(clients)
        self._calls_per_client = calls_per_client
        self._lock = threading.Lock()
        self._num_calls: dict[str | None, int] = {}
        # For each refused common name: time of its last log entry, and the calls that were refused since then.
        self._refused: dict[str, tuple[float, int]] = {}

    @contextlib.contextmanager
    def admit(self, owner: str | None) -> Iterator[None]:
        """
        Admit a call for the duration of the context.

        Args:
            owner (`str`, *optional*): Client id in the certificate. `None` without TLS; such calls share one quota.

        Raises:
            RequestRejectedError: If the client is not known, or has too many calls in progress.
        """
        if owner is not None and owner not in self._clients:
            self._log_refusal(owner)
            raise RequestRejectedError("PERMISSION_DENIED", f"The server does not know a client {_shorten(owner)}.")
        maximum = self._calls_per_client * (len(self._clients) if owner is None else 1)
        with self._lock:
            num_calls = self._num_calls.get(owner, 0)
            if num_calls >= maximum:
                raise RequestRejectedError(
                    "RESOURCE_EXHAUSTED",
                    f"Client {owner!r} has {num_calls} calls in progress, the maximum. Try again later.",
                )
            self._num_calls[owner] = num_calls + 1
        try:
            yield
        finally:
            with self._lock:
                self._num_calls[owner] -= 1

    def _log_refusal(self, owner: str) -> None:
        """Log a refused common name once, and again at most every `_LOG_INTERVAL` seconds."""
        name, now = _shorten(owner), time.monotonic()
        with self._lock:
            if name not in self._refused and len(self._refused) >= _MAX_LOGGED_NAMES:
                name = "further names"
            logged_at, num_calls = self._refused.get(name, (now - _LOG_INTERVAL, 0))
            if now - logged_at < _LOG_INTERVAL:
                self._refused[name] = logged_at, num_calls + 1
                return
            self._refused[name] = now, 0
        repeated = f" It made {num_calls} further calls in the meantime." if num_calls else ""
        logger.warning(
            f"The server refused a call with a valid certificate of {name}, which is not among its clients.{repeated}"
        )


class CallDeadlines:
    """
    Cancels calls that stay silent for too long. One thread watches all calls.

    Args:
        timeout (`float`): Seconds until the next message of a call must arrive.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._changed = threading.Condition()
        # Deadline, cancellation and description of each call that waits for a message, in the order of the deadlines.
        self._waiting: dict[object, tuple[float, Callable[[], object], str]] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="call-deadlines", daemon=True)

    def start(self) -> None:
        """Start the thread that cancels calls."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that cancels calls."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def watch(self, messages: Iterator[T], cancel: Callable[[], object], description: str) -> Iterator[T]:
        """
        Yield the messages of a call, and cancel the call if a message does not arrive in time.

        Args:
            messages (`Iterator`): The messages of the call.
            cancel (`Callable[[], object]`): Cancels the call. The iterator of the messages must then raise an error.
            description (`str`): The call, for the log.
        """
        while True:
            key = object()
            with self._changed:
                self._waiting[key] = time.monotonic() + self._timeout, cancel, description
            try:
                message = next(messages)
            except StopIteration:
                return
            finally:
                with self._changed:
                    self._waiting.pop(key, None)
            yield message

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                # All calls have the same timeout, so the first call has the earliest deadline.
                key, first = next(iter(self._waiting.items()), (None, None))
                if first is None:
                    # A call that starts in the meantime does not wake this thread, and its deadline is later.
                    self._changed.wait(self._timeout)
                    continue
                remaining = first[0] - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                    continue
                del self._waiting[key]
            _, cancel, description = first
            logger.warning(f"{description} sent no message for {self._timeout:g} s. The server ended the call.")
            cancel()


def _shorten(name: str) -> str:
    """Return a common name for a log entry or an error, without control characters and of limited length."""
    return f"'{printable(name, _MAX_NAME_CHARACTERS)}'"
