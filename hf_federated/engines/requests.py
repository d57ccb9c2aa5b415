"""The requests of a server: a plan for a cohort, and the open request of a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..messages import ClientFailure, Message
from ..messages.ledger import Ledger
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


def checked_reply(expected: ExpectedReply, reply: Message, ledger: Ledger, error: Exception | None) -> Message:
    """
    Check a reply and count its bytes.

    Args:
        expected ([`~hf_federated.messages.validation.ExpectedReply`]): What the reply must contain.
        reply (`Message`): What the client sent.
        ledger ([`Ledger`]): Counts the bytes in the round of the request.
        error (`Exception`, *optional*): The error behind a failure, if the client runs in this process.

    Returns:
        [`Message`]: The reply, or a failure of the client if the reply is refused.
    """
    round, client_id = expected.round, expected.client_id
    try:
        expected.check(reply)
        ledger.record(round, client_id, bytes_up=reply.num_bytes)
    except (TypeError, ValueError) as refused:
        return ClientFailure(round, client_id, f"its reply was refused: {refused}")
    if isinstance(reply, ClientFailure):
        # In one line, so that the text of another process cannot imitate other lines of the log. If the client runs in
        # this process, the text of the error has not left it.
        text = " ".join(reply.error.split()) if error is None else f"{type(error).__name__}: {error}"
        reply = replace(reply, error=text)
    # The nonce has served its purpose. Without it, the replies of two equal runs are equal.
    return replace(reply, nonce="")
