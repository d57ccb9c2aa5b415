"""The requests of a server: a plan for a cohort, and the open request of a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..messages import ClientFailure, Message
from ..messages.validation import ExpectedReply


@dataclass(frozen=True)
class Plan:
    """
    The work of one phase of one round.

    Args:
        round (`int`):
            Round number, from 0.
        cohort (`tuple[str, ...]`):
            Ids of the clients to ask, in order.
        message_for (`Callable[[str], Message]`):
            Builds the message of a client. An engine calls this function when it sends the message, so that the
            messages of a large cohort are never in memory together.
        phase (`str`, *optional*, defaults to `"training"`):
            Name of the phase, for error messages.
        deadline (`float`, *optional*):
            Seconds after which the engine stops waiting for replies, once `min_replies` replies have arrived. By
            default the engine waits for all clients.
        min_replies (`int`, *optional*, defaults to `0`):
            Number of replies that the engine waits for, even beyond the deadline.
        max_failures (`int`, *optional*):
            Number of failed clients after which a further failure ends the plan. With several processes, each process
            counts its own clients. By default every client is asked.
    """

    round: int
    cohort: tuple[str, ...]
    message_for: Callable[[str], Message]
    phase: str = "training"
    deadline: float | None = None
    min_replies: int = 0
    max_failures: int | None = None


@dataclass
class OpenRequest:
    """
    A request that has no reply yet.

    Args:
        message_for (`Callable[[str], Message]`): Builds the message of the client.
        on_dispatch (`Callable[[str], None]`, *optional*): Called with the client's id when the message is sent.
        round (`int`): Round number, from 0. The round of the message, once the message is sent.
        expected ([`~hf_federated.messages.validation.ExpectedReply`], *optional*): What the reply must contain. `None`
            until the message is sent.
    """

    message_for: Callable[[str], Message]
    on_dispatch: Callable[[str], None] | None
    round: int
    expected: ExpectedReply | None = None


class NoReply(ClientFailure):
    """The failure of a client that can no longer reply. The engine creates it instead of a reply."""
