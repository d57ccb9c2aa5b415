"""Each message of a session is carried out once, however often it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from .errors import RequestRejectedError
from .protocol import Outcome


class ExactlyOnceExecutor:
    """
    Carries out the messages of one session in order and once each, and tells how the last one ended as often as it is
    asked. A message that comes again while it is being carried out waits for it.

    Args:
        sender (`str`): Whose messages they are, for errors.

    Example:

    ```python
    >>> from hf_federated.transport.exactly_once import ExactlyOnceExecutor
    >>> from hf_federated.transport.protocol import Outcome

    >>> once = ExactlyOnceExecutor("north")
    >>> once.carry_out(0, "a1", lambda: Outcome("answer", b"done"))
    Outcome(kind='answer', blob=b'done', text='')
    >>> once.carry_out(0, "a1", lambda: Outcome("answer", b"done again"))
    Outcome(kind='answer', blob=b'done', text='')
    >>> once.carry_out(2, "a3", lambda: Outcome("answer", b"done"))
    Traceback (most recent call last):
    hf_federated.transport.errors.RequestRejectedError: Message 2 of 'north' came, and 1 is the next: one was lost, ...
    ```
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._changed = threading.Condition()
        self._next = 0
        self._running = False
        # Of the message that is being carried out, or else of the last one.
        self._token = ""
        self._outcome: Outcome | None = None

    def is_new(self, number: int, token: str) -> bool:
        """
        Whether a message was not carried out and is not being carried out, so that its content is needed.

        Raises:
            RequestRejectedError: If it is neither the next message nor the last one again.
        """
        with self._changed:
            return self._place(number, token) == "next"

    def carry_out(self, number: int, token: str, do: Callable[[], Outcome]) -> Outcome | None:
        """
        Carry a message out, unless that was done or is being done.

        Args:
            number (`int`): Messages before it.
            token (`str`): Which message it is.
            do (`Callable[[], Outcome]`): Carries it out. It does not raise.

        Returns:
            `Outcome`: How it ended.

        Raises:
            RequestRejectedError: If it is neither the next message nor the last one again.
        """
        with self._changed:
            if self._place(number, token) == "next":
                # The answer before was received: its bytes can go.
                self._running, self._token, self._outcome = True, token, None
            else:
                return self._wait(number, token, lambda: True)
        outcome = do()
        with self._changed:
            self._running, self._outcome = False, outcome
            self._next += 1
            self._changed.notify_all()
        return outcome

    def wait(self, number: int, token: str, wanted: Callable[[], bool]) -> Outcome | None:
        """
        How a message ended that was carried out or is being carried out.

        Args:
            number (`int`): Messages before it.
            token (`str`): Which message it is.
            wanted (`Callable[[], bool]`): Whether anybody waits; asked whenever `wake` is called.

        Returns:
            `Outcome`, *optional*: `None` where nobody waits any more.

        Raises:
            RequestRejectedError: If it is neither the next message nor the last one again.
        """
        with self._changed:
            return self._wait(number, token, wanted)

    def wake(self) -> None:
        """Let those that wait look whether anybody still wants them to."""
        with self._changed:
            self._changed.notify_all()

    def _wait(self, number: int, token: str, wanted: Callable[[], bool]) -> Outcome | None:
        while self._place(number, token) == "running":
            if not wanted():
                return None
            self._changed.wait()
        return self._outcome

    def _place(self, number: int, token: str) -> Literal["next", "running", "done"]:
        if number == self._next and not self._running:
            return "next"
        if number == self._next or (number == self._next - 1 and not self._running):
            if token != self._token:
                raise RequestRejectedError(
                    "OUT_OF_RANGE",
                    f"Two different messages of {self._sender!r} came as number {number}: a session is for one link "
                    "of one process, which sends one message at a time.",
                )
            return "running" if self._running else "done"
        if number > self._next:
            text = f"{self._next} is the next: one was lost, or sent before its turn"
        else:
            text = f"{self._next} is the next: its answer is not kept any more"
        raise RequestRejectedError("OUT_OF_RANGE", f"Message {number} of {self._sender!r} came, and {text}.")
