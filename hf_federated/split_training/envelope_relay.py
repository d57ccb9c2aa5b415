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

from .config import SplitConfig
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
from .step_plan import StepPlan


logger = logging.get_logger(__name__)


class EnvelopeRelay:
    """
    Stores encrypted messages until their recipients fetch them, at most one per pair of sender and recipient.

    Args:
        state ([`RunState`]): The run.
        split ([`SplitConfig`]): Configuration of the run. It decides which client waits for which parts.
        deadline (`float`, *optional*): Seconds without a message of the sender after which a waiting recipient
            continues without the sender, which is removed.

    Attributes:
        state ([`RunState`]): The run.
        envelopes (`dict[tuple[str, str, int], torch.Tensor]`): The stored messages, by sender, recipient and step.
        waiting_clients (`dict[str, tuple[str, int]]`): Clients that wait for a message, with its sender and step.
        trained_clients (`list[str]`): Clients that trained, in the order of their last steps.
        last_step (`int`): Number of optimizer steps of the run. Set when the run starts.
        plan ([`StepPlan`]): The clients of each step. Empty before the run starts.
    """

    def __init__(self, state: RunState, split: SplitConfig, deadline: float | None) -> None:
        self.state = state
        self._split = split
        self._deadline = deadline
        self.waiting_clients: dict[str, tuple[str, int]] = {}
        self.trained_clients: list[str] = []
        self.last_step = 0
        self.plan = StepPlan({}, simultaneous=False)
        # Last step of the messages that were delivered or dropped, by sender and recipient.
        self._delivered: dict[tuple[str, str], int] = {}
        self.envelopes: dict[tuple[str, str, int], Any] = {}
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
        if recipient not in self.state.client_ids or recipient == sender:
            raise ValueError(f"Client {sender!r} sent a message to {recipient!r}, which is not a client of this run.")
        if recipient in self.state.removed:
            return PeerRemovedReply(sender, message.step, recipient)
        if (sender, recipient, message.step) in self.envelopes:
            raise ValueError(f"Client {sender!r} sent its message of step {message.step} to {recipient!r} twice.")
        for key in [key for key in self.envelopes if key[:2] == (sender, recipient)]:
            # The sender must not fail because of a recipient that is late or hostile.
            logger.warning(f"Client {recipient!r} did not fetch the message of client {sender!r} of step {key[2]}.")
            del self.envelopes[key]
            self._delivered[sender, recipient] = key[2]
        self.envelopes[sender, recipient, message.step] = message.sealed
        if message.is_broadcast:
            self._broadcasts.setdefault((sender, message.step), set()).add(recipient)
        self._wanted.get(sender, {}).pop(recipient, None)
        self.state.condition.notify_all()
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
            ValueError: If the sender is not another client of the run, or does not send such a message in a run.
        """
        client_id, sender, step = message.client_id, message.sender, message.step
        if sender not in self.state.client_ids or sender == client_id:
            raise ValueError(
                f"Client {client_id!r} requested a message of {sender!r}, which is not another client of this run."
            )
        self._check_request(client_id, sender, step)
        started_at = time.monotonic()
        try:
            while not self._is_deliverable(sender, client_id, step):
                self.state.check(client_id)
                if (resend := self.resend_request(client_id)) is not None:
                    return resend
                if sender in self.state.finished_clients:
                    # It left without sending its parts.
                    self.state.finished_clients.discard(sender)
                    self.state.remove(sender, f"client {sender!r} left before it sent its parameters to {client_id!r}")
                elif sender in self.state.removed:
                    if not self._split.hands_over:
                        return PeerRemovedReply(client_id, step, sender)
                    substitute = self._substitute(client_id)
                    if substitute is not None:
                        self._check_undelivered(client_id, substitute, step)
                        sender, started_at = substitute, time.monotonic()
                        self._request_parts(sender, [client_id], step)
                    elif step < self.last_step or (client_id, step) in self._broadcasts:
                        return FetchEnvelopeReply(client_id, step, client_id, as_tensor(b""))
                    else:
                        # After the last step all other clients need the parts of this client, which may leave.
                        self._broadcasts[client_id, step] = set()
                        others = [name for name in self.state.active_clients if name != client_id]
                        self._request_parts(client_id, others, step)
                else:
                    self._wait(client_id, sender, step, started_at)
        finally:
            self.waiting_clients.pop(client_id, None)
        self._delivered[sender, client_id] = step
        return FetchEnvelopeReply(client_id, step, sender, self.envelopes.pop((sender, client_id, step)))

    def _check_request(self, client_id: str, sender: str, step: int) -> None:
        """
        Reject a request for a message that the sender never sends.

        After the deadline, the relay would remove the sender, which has done nothing wrong.
        """
        self._check_undelivered(client_id, sender, step)
        is_sent, is_last = 0 < step <= self.last_step, step == self.last_step
        if is_sent and self._split.hands_over:
            senders, recipients = self.plan.participants(step - 1), self.plan.participants(step)
            is_sent = sender in senders and (is_last or client_id in recipients)
        elif is_sent:
            # The first active client averages the parts of all clients.
            is_average = is_last or self._split.ends_period(step)
            is_sent = is_average and (self._may_average(sender) or self._may_average(client_id))
        if not is_sent:
            raise ValueError(
                f"Client {client_id!r} requested a message of client {sender!r} of step {step}, but the clients send "
                "no such message."
            )

    def _may_average(self, client_id: str) -> bool:
        """Whether all clients before a client were removed."""
        clients = self.state.client_ids
        return all(name in self.state.removed for name in clients[: clients.index(client_id)])

    def _check_undelivered(self, client_id: str, sender: str, step: int) -> None:
        if step <= self._delivered.get((sender, client_id), -1):
            raise ValueError(
                f"Client {client_id!r} requested the message of client {sender!r} of step {step} again, or an older "
                "message."
            )

    def resend_request(self, client_id: str) -> ResendReply | None:
        """Return the request to a client to send its parts to other clients, if there is one."""
        wanted = {
            recipient: step
            for recipient, step in self._wanted.get(client_id, {}).items()
            if recipient not in self.state.removed
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
        if (sender, recipient, step) not in self.envelopes:
            return False
        key = sender, step
        if key in self._broadcasts and key not in self._complete_broadcasts:
            others = {client_id for client_id in self.state.active_clients if client_id != sender}
            if sender in self.state.removed or not others <= self._broadcasts[key]:
                return False
            self._complete_broadcasts.add(key)
        return True

    def _substitute(self, client_id: str) -> str | None:
        """Return the client that trained last and is still in the run, or `None` if it is the client itself."""
        state = self.state
        active = [
            name for name in self.trained_clients if name not in state.removed and name not in state.finished_clients
        ]
        return active[-1] if active and active[-1] != client_id else None

    def _request_parts(self, sender: str, recipients: Sequence[str], step: int) -> None:
        for recipient in recipients:
            if (sender, recipient, step) not in self.envelopes:
                self._wanted.setdefault(sender, {})[recipient] = step
        self.state.condition.notify_all()

    def _wait(self, client_id: str, sender: str, step: int, started_at: float) -> None:
        """
        Wait for a change, or remove a sender that sends nothing until the deadline after the preceding step.

        A sender that waits for a third client, or that averages and waits for any client, is not removed.
        """
        self.waiting_clients[client_id] = sender, step
        awaited, awaited_step = self.waiting_clients.get(sender, (client_id, step + 1))
        is_held_up = awaited_step <= step and (awaited != client_id or self._may_average(sender))
        if self._deadline is None or is_held_up or self.state.step < step:
            self.state.condition.wait()
            return
        remaining = max(started_at, self.state.last_message_at[sender]) + self._deadline - time.monotonic()
        if remaining <= 0:
            self.state.remove(sender, f"client {sender!r} did not send its parameters within {self._deadline:g} s")
        else:
            self.state.condition.wait(remaining)
