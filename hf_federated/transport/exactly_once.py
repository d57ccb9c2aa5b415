"""Exactly-once processing of the messages of a session, however often a message is delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .errors import RequestRejectedError
from .protocol import MAX_MESSAGES_IN_FLIGHT, MessageHeader, Outcome


@dataclass
class _Entry:
    """
    A message that has arrived as a whole.

    Args:
        token (`str`): Random token that identifies the message.
        outcome (`Outcome`, *optional*): The outcome. `None` while the message waits or is processed.
    """

    token: str
    outcome: Outcome | None = None


class ExactlyOnceExecutor:
    """
    Processes the messages of one session in order and exactly once.

    A message that arrives early waits for the messages before. If a message is delivered again, the executor returns
    the stored outcome, or waits for it. An outcome is stored until the client confirms that it received the answer.

    Args:
        sender (`str`): Id of the client that sends the messages, for errors.

    Example:

    ```python
    >>> from hf_federated.transport.exactly_once import ExactlyOnceExecutor
    >>> from hf_federated.transport.protocol import MessageHeader, Outcome

    >>> executor = ExactlyOnceExecutor("north")
    >>> first = MessageHeader("session", number=0, token="a1", num_bytes=1, oldest=0)
    >>> executor.execute(first, lambda: Outcome("answer", b"done"), lambda: True)
    Outcome(kind='answer', blob=b'done', text='')
    >>> executor.execute(first, lambda: Outcome("answer", b"done again"), lambda: True)
    Outcome(kind='answer', blob=b'done', text='')
    >>> third = MessageHeader("session", number=2, token="a3", num_bytes=1, oldest=2)
    >>> executor.execute(third, lambda: Outcome("answer", b"done"), lambda: True)
    Traceback (most recent call last):
    hf_federated.transport.errors.RequestRejectedError: Message 2 of 'north' arrived, but message 1 is expected: ...
    ```
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._changed = threading.Condition()
        # Number of the message that is processed now or next.
        self._next_number = 0
        # The messages that have arrived and whose answers are not confirmed, by number.
        self._entries: dict[int, _Entry] = {}
        self._oldest = 0

    def is_new(self, header: MessageHeader) -> bool:
        """
        Whether a message is new: it has not arrived as a whole before.

        Args:
            header ([`MessageHeader`]): Header of the message.

        Raises:
            RequestRejectedError: If the message is not allowed at this time.
        """
        with self._changed:
            return self._state(header) == "new"

    def wait_for_turn(self, header: MessageHeader, is_waiting: Callable[[], bool]) -> None:
        """
        Wait until all messages before a message were processed.

        Args:
            header ([`MessageHeader`]): Header of the message.
            is_waiting (`Callable[[], bool]`): As in `wait_for_outcome`.
        """
        with self._changed:
            self._changed.wait_for(lambda: header.number <= self._next_number or not is_waiting())

    def execute(
        self, header: MessageHeader, call: Callable[[], Outcome], is_open: Callable[[], bool]
    ) -> Outcome | None:
        """
        Process a message after all messages before it, unless it has arrived before.

        Args:
            header ([`MessageHeader`]): Header of the message.
            call (`Callable[[], Outcome]`): Processes the message. It must not raise exceptions.
            is_open (`Callable[[], bool]`): Whether the session is open. Called again after each `notify_waiters`.

        Returns:
            `Outcome`, *optional*: The outcome of the message, or `None` if the session ended before its turn.

        Raises:
            RequestRejectedError: If the message is not allowed at this time.
        """
        with self._changed:
            if self._state(header) != "new":
                return self._wait(header, is_open)
            entry = self._entries[header.number] = _Entry(header.token)
            # Free the bytes of the answers that the client has received.
            for number in range(self._oldest, header.oldest):
                self._entries.pop(number, None)
            self._oldest = max(self._oldest, header.oldest)
            self._changed.wait_for(lambda: self._next_number == header.number or not is_open())
            if self._next_number != header.number:
                return None
        outcome = call()
        with self._changed:
            entry.outcome = outcome
            self._next_number += 1
            self._changed.notify_all()
        return outcome

    def wait_for_outcome(self, header: MessageHeader, is_waiting: Callable[[], bool]) -> Outcome | None:
        """
        Wait for the outcome of a message that has arrived before.

        Args:
            header ([`MessageHeader`]): Header of the message.
            is_waiting (`Callable[[], bool]`): Whether the client still waits for the outcome. Called again after each
                `notify_waiters`.

        Returns:
            `Outcome`, *optional*: The outcome, or `None` if the client no longer waits.

        Raises:
            RequestRejectedError: If the message is not allowed at this time.
        """
        with self._changed:
            return self._wait(header, is_waiting)

    def notify_waiters(self) -> None:
        """Wake all waiting calls. Each call checks whether its client still waits."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, header: MessageHeader, is_waiting: Callable[[], bool]) -> Outcome | None:
        self._changed.wait_for(lambda: self._state(header) != "unfinished" or not is_waiting())
        return self._entries[header.number].outcome

    def _state(self, header: MessageHeader) -> Literal["new", "unfinished", "done"]:
        number = header.number
        if (entry := self._entries.get(number)) is not None:
            if header.token != entry.token:
                raise RequestRejectedError(
                    "OUT_OF_RANGE",
                    f"Two different messages of {self._sender!r} have the number {number}. A session allows one link "
                    "in one process.",
                )
            return "unfinished" if entry.outcome is None else "done"
        if header.oldest <= self._next_number <= number < header.oldest + MAX_MESSAGES_IN_FLIGHT:
            return "new"
        is_ahead = number >= self._next_number
        reason = "a message was lost, or sent out of order" if is_ahead else "the answer is no longer stored"
        raise RequestRejectedError(
            "OUT_OF_RANGE",
            f"Message {number} of {self._sender!r} arrived, but message {self._next_number} is expected: {reason}.",
        )
