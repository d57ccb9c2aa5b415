"""Envelopes that clients of a networked run write one another, which the server keeps until they are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .control import Fetch, Send


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
