"""Messages of several clients that a server answers together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any


# Answers the messages of clients that meet, in their order.
Answer = Callable[[Sequence[Any]], Sequence[Any]]


class Gathering:
    """Messages of one kind that are answered together."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.messages: dict[str, Any] = {}
        self.answers: dict[str, Any] | None = None
        self.error: str | None = None

    @property
    def settled(self) -> bool:
        return self.answers is not None or self.error is not None

    def settle(self, messages: Sequence[Any], answer: Answer) -> None:
        """
        Answer them, or keep what those that sent them are told is wrong.

        Raises:
            Exception: Of another class than `ValueError`.
        """
        try:
            answers = answer(messages)
        except ValueError as error:
            self.error = str(error)
            return
        self.answers = {own.client_id: one for own, one in zip(messages, answers, strict=True)}
