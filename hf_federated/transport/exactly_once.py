"""Exactly-once processing of the messages of a session, however often a message is delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from .errors import RequestRejectedError
from .protocol import Outcome


class ExactlyOnceExecutor:
    """
    Processes the messages of one session in order and exactly once.

    If the most recent message is delivered again, the executor returns the stored outcome. If the message is still in
    progress, the repeated delivery waits for the outcome.

    Args:
        sender (`str`): Id of the client that sends the messages, for errors.

    Example:

    ```python
    >>> from hf_federated.transport.exactly_once import ExactlyOnceExecutor
    >>> from hf_federated.transport.protocol import Outcome

    >>> executor = ExactlyOnceExecutor("north")
    >>> executor.execute(0, "a1", lambda: Outcome("answer", b"done"))
    Outcome(kind='answer', blob=b'done', text='')
    >>> executor.execute(0, "a1", lambda: Outcome("answer", b"done again"))
    Outcome(kind='answer', blob=b'done', text='')
    >>> executor.execute(2, "a3", lambda: Outcome("answer", b"done"))
    Traceback (most recent call last):
    hf_federated.transport.errors.RequestRejectedError: Message 2 of 'north' arrived, but message 1 is expected: ...
    ```
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._changed = threading.Condition()
        self._next_number = 0
        self._is_running = False
        # Token and outcome of the message in progress, or of the most recent message.
        self._token = ""
        self._outcome: Outcome | None = None

    def is_new(self, number: int, token: str) -> bool:
        """
        Whether a message is new: it was not processed, and is not in progress.

        Args:
            number (`int`): Number of the message in the session, from 0.
            token (`str`): Random token that identifies the message.

        Raises:
            RequestRejectedError: If the message is neither the next message nor a repetition of the most recent
                message.
        """
        with self._changed:
            return self._state(number, token) == "next"

    def execute(self, number: int, token: str, call: Callable[[], Outcome]) -> Outcome | None:
        """
        Process a message, unless it was processed or is in progress.

        Args:
            number (`int`): Number of the message in the session, from 0.
            token (`str`): Random token that identifies the message.
            call (`Callable[[], Outcome]`): Processes the message. It must not raise exceptions.

        Returns:
            `Outcome`: The outcome of the message.

        Raises:
            RequestRejectedError: If the message is neither the next message nor a repetition of the most recent
                message.
        """
        with self._changed:
            if self._state(number, token) == "next":
                # The next message confirms that the client received the previous answer. Free the bytes of the answer.
                self._is_running, self._token, self._outcome = True, token, None
            else:
                return self._wait(number, token, lambda: True)
        outcome = call()
        with self._changed:
            self._is_running, self._outcome = False, outcome
            self._next_number += 1
            self._changed.notify_all()
        return outcome

    def wait_for_outcome(self, number: int, token: str, is_waiting: Callable[[], bool]) -> Outcome | None:
        """
        Wait for the outcome of a message that was processed or is in progress.

        Args:
            number (`int`): Number of the message in the session, from 0.
            token (`str`): Random token that identifies the message.
            is_waiting (`Callable[[], bool]`): Whether the client still waits for the outcome. Called again after each
                `notify_waiters`.

        Returns:
            `Outcome`, *optional*: The outcome, or `None` if the client no longer waits.

        Raises:
            RequestRejectedError: If the message is neither the next message nor a repetition of the most recent
                message.
        """
        with self._changed:
            return self._wait(number, token, is_waiting)

    def notify_waiters(self) -> None:
        """Wake all waiting calls. Each call checks whether its client still waits."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, number: int, token: str, is_waiting: Callable[[], bool]) -> Outcome | None:
        while self._state(number, token) == "running":
            if not is_waiting():
                return None
            self._changed.wait()
        return self._outcome

    def _state(self, number: int, token: str) -> Literal["next", "running", "done"]:
        if number == self._next_number and not self._is_running:
            return "next"
        if number == self._next_number or (number == self._next_number - 1 and not self._is_running):
            if token != self._token:
                raise RequestRejectedError(
                    "OUT_OF_RANGE",
                    f"Two different messages of {self._sender!r} have the number {number}. A session allows one link "
                    "in one process, which sends one message at a time.",
                )
            return "running" if self._is_running else "done"
        if number > self._next_number:
            reason = "a message was lost, or sent out of order"
        else:
            reason = "the answer is no longer stored"
        raise RequestRejectedError(
            "OUT_OF_RANGE",
            f"Message {number} of {self._sender!r} arrived, but message {self._next_number} is expected: {reason}.",
        )
