"""The answers that a client of a networked run accepts to its messages."""

from __future__ import annotations

from typing import TypeVar

from ..messages.serialization import packed_kind
from ..split.agreement import RefusedAnswerError, check_equal, read_answer
from ..split.messages import Backward, Forget, Forward, Gradient, Hidden
from .messages import (
    BeginStep,
    BeginStepReply,
    ControlMessage,
    EndStep,
    EndStepReply,
    FetchEnvelope,
    FetchEnvelopeReply,
    Finish,
    Join,
    JoinReply,
    LateReply,
    PeerRemovedReply,
    ResendReply,
    SendEnvelope,
    SendEnvelopeReply,
    StepMessage,
    read_message,
)
from .networked_checks import MAX_STEPS_PER_EPOCH


R = TypeVar("R", bound=ControlMessage)

# The kinds of the answers to each message. A message without an answer has no kinds.
ANSWERS: dict[str | None, tuple[str, ...]] = {
    Join.kind: (JoinReply.kind,),
    BeginStep.kind: (BeginStepReply.kind, LateReply.kind, ResendReply.kind),
    EndStep.kind: (EndStepReply.kind, LateReply.kind),
    SendEnvelope.kind: (SendEnvelopeReply.kind, PeerRemovedReply.kind),
    FetchEnvelope.kind: (FetchEnvelopeReply.kind, PeerRemovedReply.kind, ResendReply.kind),
    Forward.kind: (Hidden.kind, LateReply.kind),
    Backward.kind: (Gradient.kind, LateReply.kind),
    Finish.kind: (),
    Forget.kind: (),
}


def check_kind(message: bytes, answer: bytes | memoryview) -> str:
    """
    Check that an answer is of a kind that answers a message.

    Args:
        message (`bytes`): The serialized message.
        answer (`bytes`): The serialized answer.

    Returns:
        `str`: The kind of the answer. Empty if the message has no answer.

    Raises:
        RefusedAnswerError: If the answer is of another kind.
    """
    kind, sent = packed_kind(answer) or "", packed_kind(message)
    allowed = ANSWERS.get(sent, ())
    if kind not in allowed and (allowed or len(answer)):
        agreed = " or ".join(map(repr, allowed)) or "no answer"
        raise RefusedAnswerError(kind or "unknown", "kind", f"answers a message of kind {sent!r}", agreed)
    return kind


def read_reply(message: ControlMessage, answer_class: type[R], blob: bytes | memoryview) -> R:
    """
    Deserialize the answer to a control message.

    Args:
        message (`ControlMessage`): The message.
        answer_class (`type`): The class of the answer.
        blob (`bytes`): The serialized answer.

    Raises:
        RefusedAnswerError: If the answer is damaged, or of another kind, client or step.
    """
    answer = read_answer(answer_class, blob)
    check_equal(answer, "client_id", message.client_id)
    # A client can be asked for its parameters of another step.
    if isinstance(message, StepMessage) and not isinstance(answer, ResendReply):
        check_equal(answer, "step", message.step)
    return answer


def read_removed_peer(message: bytes, answer: bytes | memoryview) -> str:
    """
    Return the removed client that an answer names.

    Args:
        message (`bytes`): The serialized message to or from the other client.
        answer (`bytes`): The serialized [`PeerRemovedReply`].

    Raises:
        RefusedAnswerError: If the answer is damaged, or names another client than the message.
    """
    request: SendEnvelope | FetchEnvelope = read_message(message)
    reply = read_reply(request, PeerRemovedReply, answer)
    check_equal(reply, "peer", request.recipient if isinstance(request, SendEnvelope) else request.sender)
    return reply.peer


def check_join_reply(message: Join, reply: JoinReply) -> None:
    """
    Check the start of the run.

    Args:
        message ([`Join`]): The message of the client.
        reply ([`JoinReply`]): The answer.

    Raises:
        RefusedAnswerError: If the client would take another number of steps than its examples need, or resume from a
            checkpoint that it does not have.
        ValueError: If the clients and their introductions differ.
    """
    client_id, steps_of = message.client_id, reply.steps_of
    if client_id not in steps_of or reply.introductions.keys() != steps_of.keys():
        raise ValueError(
            f"The server names the clients {list(steps_of)} with introductions of {list(reply.introductions)}, but "
            f"both lists must be equal and contain this client, {client_id!r}. Start the server with the ids of all "
            "clients."
        )
    for name, num_steps in steps_of.items():
        if num_steps != message.num_steps if name == client_id else num_steps > MAX_STEPS_PER_EPOCH:
            agreed = f"{message.num_steps} steps in an epoch, and at most {MAX_STEPS_PER_EPOCH} of other clients"
            raise RefusedAnswerError(reply.kind, "steps_of", f"has {num_steps} steps of client {name!r}", agreed)
    if reply.resume_step not in (0, *message.checkpoints):
        agreed = f"0 or the step of one of its checkpoints, {message.checkpoints[-5:]}"
        raise RefusedAnswerError(reply.kind, "resume_step", f"is {reply.resume_step}", agreed)
