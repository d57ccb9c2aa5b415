"""
Relay of encrypted messages between the clients of a networked run. The server cannot read them.

Clients send each other their trained parts: to the client whose turn follows, or to the client that averages. If the
sender is removed from the run, the relay answers so, and the recipient continues without the message. With the serial
strategy the relay then asks the client that trained before the removed client to send its parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers.utils import logging

from .messages import (
    FetchEnvelope,
    FetchEnvelopeReply,
    PeerRemovedReply,
    ResendReply,
    SendEnvelope,
    SendEnvelopeReply,
    as_tensor,
)
from .run_state import RunState


logger = logging.get_logger(__name__)


class EnvelopeRelay:
    """
    Stores encrypted messages until their recipients fetch them, at most one per pair of sender and recipient.

    Args:
        state ([`RunState`]): The run.
        hands_over (`bool`): Whether each client continues with the parts of the previous client.
        deadline (`float`, *optional*): Seconds without a message of the sender after which a waiting recipient
            continues without the sender, which is removed.

    Attributes:
        waiting_clients (`set[str]`): Clients that wait for a message.
        trained_clients (`list[str]`): Clients that trained, in the order of their last steps.
        last_step (`int`): Number of optimizer steps of the run. Set when the run starts.
    """

    def __init__(self, state: RunState, hands_over: bool, deadline: float | None) -> None:
        self._state = state
        self._hands_over = hands_over
        self._deadline = deadline
        self.waiting_clients: set[str] = set()
        self.trained_clients: list[str] = []
        self.last_step = 0
        # Keys: sender, recipient, step.
        self._envelopes: dict[tuple[str, str, int], Any] = {}
        # Recipients of the envelopes that a client sends to all others, by sender and step.
        self._broadcasts: dict[tuple[str, int], set[str]] = {}
        self._complete_broadcasts: set[tuple[str, int]] = set()
        # Clients that need the parts of a client, with the step of their request.
        self._wanted: dict[str, dict[str, int]] = {}

    def record_training(self, client_id: str) -> None:
        """Record that a client took a step."""
        if client_id in self.trained_clients:
            self.trained_clients.remove(client_id)
        self.trained_clients.append(client_id)

    def store(self, message: SendEnvelope) -> SendEnvelopeReply | PeerRemovedReply:
        """
        Store a message.

        A message that the recipient did not fetch is dropped if the sender sends another message.

        Raises:
            ValueError: If the recipient is not another client of the run, or the message was sent before.
        """
        sender, recipient = message.client_id, message.recipient
        if recipient not in self._state.client_ids or recipient == sender:
            raise ValueError(f"Client {sender!r} sent a message to {recipient!r}, which is not a client of this run.")
        if recipient in self._state.removed:
            return PeerRemovedReply(sender, message.step, recipient)
        if (sender, recipient, message.step) in self._envelopes:
            raise ValueError(f"Client {sender!r} sent its message of step {message.step} to {recipient!r} twice.")
        for key in [key for key in self._envelopes if key[:2] == (sender, recipient)]:
            # The sender must not fail because of a recipient that is late or hostile.
            logger.warning(f"Client {recipient!r} did not fetch the message of client {sender!r} of step {key[2]}.")
            del self._envelopes[key]
        self._envelopes[sender, recipient, message.step] = message.sealed
        if message.is_broadcast:
            self._broadcasts.setdefault((sender, message.step), set()).add(recipient)
        self._wanted.get(sender, {}).pop(recipient, None)
        self._state.condition.notify_all()
        return SendEnvelopeReply(sender, message.step)

    def deliver(self, message: FetchEnvelope) -> FetchEnvelopeReply | PeerRemovedReply | ResendReply:
        """
        Wait for a message of another client and return it.

        Returns:
            [`FetchEnvelopeReply`]: The message. With `hands_over` the sender differs from the requested sender if the
            requested sender was removed. If no client has newer parts, the sender is the client itself.
            [`PeerRemovedReply`]: The sender was removed.
            [`ResendReply`]: The client must send its parts to other clients first.

        Raises:
            ValueError: If the sender is not another client of the run.
        """
        client_id, sender, step = message.client_id, message.sender, message.step
        if sender not in self._state.client_ids or sender == client_id:
            raise ValueError(
                f"Client {client_id!r} requested a message of {sender!r}, which is not another client of this run."
            )
        started_at = time.monotonic()
        self.waiting_clients.add(client_id)
        try:
            while not self._is_deliverable(sender, client_id, step):
                self._state.check(client_id)
                if (resend := self.resend_request(client_id)) is not None:
                    return resend
                if sender in self._state.finished_clients:
                    self._remove_finished(sender, client_id)
                elif sender in self._state.removed:
                    if not self._hands_over:
                        return PeerRemovedReply(client_id, step, sender)
                    substitute = self._substitute(client_id)
                    if substitute is not None:
                        sender, started_at = substitute, time.monotonic()
                        self._request_parts(sender, [client_id], step)
                    elif step < self.last_step or (client_id, step) in self._broadcasts:
                        return FetchEnvelopeReply(client_id, step, client_id, as_tensor(b""))
                    else:
                        # After the last step all other clients need the parts of this client, which may leave.
                        self._broadcasts[client_id, step] = set()
                        others = [name for name in self._state.active_clients if name != client_id]
                        self._request_parts(client_id, others, step)
                else:
                    self._wait(sender, started_at)
        finally:
            self.waiting_clients.discard(client_id)
        return FetchEnvelopeReply(client_id, step, sender, self._envelopes.pop((sender, client_id, step)))

    def resend_request(self, client_id: str) -> ResendReply | None:
        """Return the request to a client to send its parts to other clients, if there is one."""
        wanted = {
            recipient: step
            for recipient, step in self._wanted.get(client_id, {}).items()
            if recipient not in self._state.removed
        }
        if not wanted:
            return None
        step = min(wanted.values())
        return ResendReply(client_id, step, sorted(name for name, value in wanted.items() if value == step))

    def _is_deliverable(self, sender: str, recipient: str, step: int) -> bool:
        """
        Whether a message has arrived.

        The messages that a client sends to all others are delivered after the last of them has arrived. If the sender
        is removed earlier, no client continues with its parts while another client lacks them.
        """
        if (sender, recipient, step) not in self._envelopes:
            return False
        key = sender, step
        if key in self._broadcasts and key not in self._complete_broadcasts:
            others = {client_id for client_id in self._state.active_clients if client_id != sender}
            if sender in self._state.removed or not others <= self._broadcasts[key]:
                return False
            self._complete_broadcasts.add(key)
        return True

    def _remove_finished(self, sender: str, client_id: str) -> None:
        """Remove a client that finished without sending its parts."""
        self._state.finished_clients.discard(sender)
        self._state.remove(sender, f"client {sender!r} left before it sent its parameters to {client_id!r}")

    def _substitute(self, client_id: str) -> str | None:
        """Return the client that trained last and is still in the run, or `None` if it is the client itself."""
        state = self._state
        active = [
            name for name in self.trained_clients if name not in state.removed and name not in state.finished_clients
        ]
        return active[-1] if active and active[-1] != client_id else None

    def _request_parts(self, sender: str, recipients: Sequence[str], step: int) -> None:
        for recipient in recipients:
            if (sender, recipient, step) not in self._envelopes:
                self._wanted.setdefault(sender, {})[recipient] = step
        self._state.condition.notify_all()

    def _wait(self, sender: str, started_at: float) -> None:
        """Wait for a change, or remove a sender that sends nothing until the deadline."""
        if self._deadline is None or sender in self.waiting_clients:
            self._state.condition.wait()
            return
        remaining = max(started_at, self._state.last_message_at[sender]) + self._deadline - time.monotonic()
        if remaining <= 0:
            self._state.remove(sender, f"client {sender!r} did not send its parameters within {self._deadline:g} s")
        else:
            self._state.condition.wait(remaining)
