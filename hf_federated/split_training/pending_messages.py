"""What clients said that they would send in a step of a networked run, and what of it came.

A client sends hidden states and then their gradient, once for each batch, and then ends the step. What comes otherwise
is refused before anybody waits for it: where clients meet, one that skips a passage would stop all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..split.messages import Backward, Forward
from .messages import Begin, Fetch, Send, Step


# Answers the messages of clients that meet, in their order.
Answer = Callable[[Sequence[Any]], Sequence[Any]]


class Passages:
    """
    The passages of one step.

    Args:
        meets (`bool`): Whether clients meet at every passage, so that each is over before the client's next one.
    """

    def __init__(self, meets: bool) -> None:
        self._meets = meets
        self._begun: dict[str, Begin] = {}
        # Rows of the passages that went up, in their order, and those of which the gradient came.
        self._rows: dict[str, list[int]] = {}
        self._returned: dict[str, set[int]] = {}

    def begin(self, message: Begin) -> None:
        """
        A client takes part.

        Raises:
            ValueError: If it said so before, perhaps otherwise.
        """
        if message.client_id in self._begun:
            raise ValueError(f"Client {message.client_id!r} began step {message.step} already.")
        self._begun[message.client_id] = message

    def may_come(self, client_id: str, micro_step: int) -> bool:
        """Whether a client may make a passage: it said so, or has said nothing yet."""
        return client_id not in self._begun or self._begun[client_id].num_batches > micro_step

    def num_rows(self, client_id: str) -> int:
        """Rows that a client trains in the step."""
        return self._begun[client_id].num_rows

    def check(self, message: Forward | Backward | Step) -> None:
        """
        Refuse what does not follow on what came before.

        Raises:
            ValueError: If the client takes no part in the step, or sends more, less or in another order than it said.
        """
        client_id, begun = message.client_id, self._begun.get(message.client_id)
        if begun is None:
            raise ValueError(f"Client {client_id!r} did not begin step {message.step}.")
        said = f"Client {client_id!r} began step {message.step} with"
        rows, returned = self._rows.get(client_id, []), self._returned.get(client_id, set())
        if isinstance(message, Step):
            if not len(rows) == len(returned) == begun.num_batches:
                raise ValueError(
                    f"{said} {begun.num_batches} passages and ends it after {len(rows)}, of which {len(returned)} had"
                    " a gradient: the loss of every batch is one of what the model says, and its gradient is sent."
                )
            if begun.num_rows > sum(rows):
                raise ValueError(
                    f"{said} {begun.num_rows} rows, and {sum(rows)} crossed: the rows of a batch are those on which "
                    "the loss calls the model."
                )
        elif message.micro_step >= begun.num_batches:
            raise ValueError(
                f"{said} {begun.num_batches} passages, and another came: a loss calls the model once for each batch."
            )
        elif isinstance(message, Forward):
            if message.micro_step != len(rows):
                raise ValueError(
                    f"Passage {message.micro_step} of client {client_id!r} came at step {message.step}, and "
                    f"{len(rows)} is the next."
                )
            if self._meets and len(rows) != len(returned):
                raise ValueError(
                    f"Passage {message.micro_step} of client {client_id!r} came at step {message.step} before the "
                    "gradient of the one before it."
                )
        elif message.micro_step >= len(rows) or message.micro_step in returned:
            raise ValueError(
                f"No passage {message.micro_step} of client {client_id!r} waits for its gradient at step "
                f"{message.step}."
            )

    def count(self, message: Forward | Backward) -> None:
        """A passage was answered."""
        if isinstance(message, Forward):
            self._rows.setdefault(message.client_id, []).append(message.num_sequences)
        else:
            self._returned.setdefault(message.client_id, set()).add(message.micro_step)


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


class Mailbox:
    """
    Keeps envelopes, at most one from each client for each other.

    Args:
        client_ids (`Sequence[str]`): Who takes part.

    Attributes:
        waiting (`set[str]`): Clients that wait for an envelope.
    """

    def __init__(self, client_ids: Sequence[str]) -> None:
        self.waiting: set[str] = set()
        self._client_ids = client_ids
        self._envelopes: dict[tuple[str, str, int], Any] = {}

    def put(self, message: Send) -> None:
        """
        Keep an envelope.

        Raises:
            ValueError: If the recipient takes no part, or one waits for it already.
        """
        own, recipient = message.client_id, message.recipient
        if recipient not in self._client_ids:
            raise ValueError(f"{own!r} sent an envelope to {recipient!r}, who takes no part.")
        if any(key[:2] == (own, recipient) for key in self._envelopes):
            raise ValueError(f"An envelope from {own!r} for {recipient!r} waits to be fetched.")
        self._envelopes[own, recipient, message.step] = message.sealed

    def check(self, message: Fetch) -> None:
        """
        Raises:
            ValueError: If nobody writes the envelope that a client waits for.
        """
        if message.sender not in self._client_ids or message.sender == message.client_id:
            raise ValueError(
                f"Client {message.client_id!r} waits for an envelope of {message.sender!r}, who writes none to it."
            )

    def has(self, message: Fetch) -> bool:
        """Whether the envelope is there."""
        return (message.sender, message.client_id, message.step) in self._envelopes

    def take(self, message: Fetch) -> Any:
        """Hand the envelope out."""
        return self._envelopes.pop((message.sender, message.client_id, message.step))
