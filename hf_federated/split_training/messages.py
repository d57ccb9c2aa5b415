"""Messages of a networked run, apart from hidden states and their gradients.

Control messages coordinate the run between a client and the server. Each control message names the client that sends
the message or receives the answer. The type and the range of each field are checked against its annotation.
[`PartParameters`] transfers trained parameters from one client to another. In a networked run the clients encrypt
these parameters for each other (`security/peer_envelopes.py`). The server relays the encrypted message without access
to the content, but sees its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from ..messages import Serializable
from ..messages.validation import first_non_finite
from ..split.messages import REQUESTS, raise_problem, read_one_of
from ..split.server_state import MAX_GRAPHS
from ..utils.fields import Count, MaxEntries, PositiveCount, Requirement, TensorOf, check_fields, problems_of


@dataclass(frozen=True)
class ControlMessage(Serializable):
    """
    Base class of the control messages.

    Args:
        client_id (`str`): The client that sends the message or receives the answer.

    Raises:
        ValueError: If a field has a wrong type, or a negative value where a count or a norm is expected.
    """

    checks_fields: ClassVar[bool] = True

    client_id: str

    def __post_init__(self) -> None:
        check_fields(self, f"{self.kind}: ")


@dataclass(frozen=True)
class StepMessage(ControlMessage):
    """
    Base class of the control messages about a step.

    Args:
        step (`int`): Number of optimizer steps so far.
    """

    step: Count


Bytes = Annotated[
    torch.Tensor, TensorOf(torch.uint8, ndim=1), Requirement("must be a tensor of bytes, uint8 of shape (num_bytes,)")
]


@dataclass(frozen=True)
class Join(ControlMessage):
    """
    Client to server: join the run.

    Args:
        digest (`str`): Digest of the settings that all parties share, see [`~split_training.config.run_digest`].
        num_steps (`int`): Optimizer steps of this client in an epoch.
        checkpoints (`list[int]`): Steps of the checkpoints from which this client can resume.
        introduction (`torch.Tensor`): Signed public key for the other clients; uint8 of shape `(num_bytes,)`. Empty if
            the client exchanges no encrypted parameters.
    """

    kind: ClassVar[str] = "split_join"

    digest: str
    num_steps: Count
    checkpoints: Annotated[list[PositiveCount], MaxEntries(10_000)]
    introduction: Bytes


@dataclass(frozen=True)
class JoinReply(ControlMessage):
    """
    Server to client: all clients have joined.

    Args:
        resume_step (`int`): Latest step for which all parties have a checkpoint; 0 starts from scratch.
        steps_of (`dict[str, int]`): Optimizer steps of each client in an epoch, in the order of the clients.
        introductions (`dict[str, torch.Tensor]`): The introduction of each client, by client id.
    """

    kind: ClassVar[str] = "split_joined"

    resume_step: Count
    steps_of: dict[str, PositiveCount]
    introductions: dict[str, Bytes]


@dataclass(frozen=True)
class BeginStep(StepMessage):
    """
    Client to server: wait for a step, and take part in it.

    Args:
        step (`int`): Number of optimizer steps before this one.
        num_batches (`int`): Micro-batches of this client in the step; 0 waits for the step without taking part.
        num_rows (`int`): Examples of this client in the step, the client's weight in the average of the body replicas.
            At most the number of examples in the client's micro-batches.
    """

    kind: ClassVar[str] = "split_begin"

    num_batches: Count
    num_rows: Count


@dataclass(frozen=True)
class BeginStepReply(StepMessage):
    """Server to client: the step has begun."""

    kind: ClassVar[str] = "split_begun"


@dataclass(frozen=True)
class EndStep(StepMessage):
    """
    Client to server: the client has all gradients of the step.

    Args:
        step (`int`): Number of optimizer steps before this one.
        squared_norm (`float`): Squared norm of the gradients of the client's head and tail. The server removes a
            client that reports NaN or infinity.
    """

    kind: ClassVar[str] = "split_step"

    squared_norm: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.squared_norm < 0:
            raise ValueError(f"{self.kind}: squared_norm is {self.squared_norm}, but must be at least 0.")


@dataclass(frozen=True)
class EndStepReply(StepMessage):
    """
    Server to client: the server has updated its parameters.

    Args:
        step (`int`): Number of optimizer steps before this one.
        norm (`float`): Norm of the gradients of all parties that share the step. Each party clips its gradients by
            this norm.
    """

    kind: ClassVar[str] = "split_stepped"

    norm: float


@dataclass(frozen=True)
class LateReply(StepMessage):
    """Server to client: the deadline has passed, and the step continues without this client."""

    kind: ClassVar[str] = "split_late"


@dataclass(frozen=True)
class SendEnvelope(StepMessage):
    """
    Client to server: an encrypted message for another client.

    Args:
        step (`int`): Number of optimizer steps so far.
        recipient (`str`): The client that can decrypt the message.
        sealed (`torch.Tensor`): The encrypted message; uint8 of shape `(num_bytes,)`.
        is_broadcast (`bool`): Whether the client sends the same parameters to all other clients. The server delivers
            them after the last of them has arrived.
    """

    kind: ClassVar[str] = "split_send"

    recipient: str
    sealed: Bytes
    is_broadcast: bool = False


@dataclass(frozen=True)
class SendEnvelopeReply(StepMessage):
    """Server to client: the server stores the encrypted message until the recipient fetches the message."""

    kind: ClassVar[str] = "split_sent"


@dataclass(frozen=True)
class FetchEnvelope(StepMessage):
    """
    Client to server: wait for an encrypted message of another client.

    Args:
        step (`int`): Number of optimizer steps so far.
        sender (`str`): The client that sends the message.
    """

    kind: ClassVar[str] = "split_fetch"

    sender: str


@dataclass(frozen=True)
class FetchEnvelopeReply(StepMessage):
    """
    Server to client: an encrypted message of another client.

    Args:
        step (`int`): Number of optimizer steps so far.
        sender (`str`): The client that sent the message. If the requested sender was removed from the run, this is the
            client that trained before it. The client itself if no other client has newer parameters.
        sealed (`torch.Tensor`): The encrypted message; uint8 of shape `(num_bytes,)`.
    """

    kind: ClassVar[str] = "split_fetched"

    sender: str
    sealed: Bytes


@dataclass(frozen=True)
class PeerRemovedReply(StepMessage):
    """
    Server to client: the other client of the request was removed from the run.

    Args:
        step (`int`): Step of the request.
        peer (`str`): The removed client.
    """

    kind: ClassVar[str] = "split_removed"

    peer: str


@dataclass(frozen=True)
class ResendReply(StepMessage):
    """
    Server to client: send the parameters to other clients, and then send the request again.

    The clients need the parameters because the client that trained afterwards was removed from the run.

    Args:
        step (`int`): Number of optimizer steps so far.
        recipients (`list[str]`): The clients that need the parameters.
    """

    kind: ClassVar[str] = "split_resend"

    recipients: list[str]


@dataclass(frozen=True)
class Finish(StepMessage):
    """Client to server: the client has finished and sends no further requests."""

    kind: ClassVar[str] = "split_finish"


# Largest number of messages in a bundle: the micro-batches in flight, and what begins and ends a step.
MAX_BUNDLED = MAX_GRAPHS + 8


@dataclass(frozen=True)
class Bundle(ControlMessage):
    """
    Several messages in one exchange, or their answers.

    The server processes the messages in order. If an answer is a [`LateReply`], [`PeerRemovedReply`] or
    [`ResendReply`], the server does not process the following messages, and the bundle of the answers ends with it.

    Args:
        messages (`list[torch.Tensor]`): The serialized messages or answers; each uint8 of shape `(num_bytes,)`.
    """

    kind: ClassVar[str] = "split_bundle"

    messages: Annotated[list[Bytes], MaxEntries(MAX_BUNDLED)]


CONTROL_MESSAGES: dict[str, type[ControlMessage]] = {
    message.kind: message for message in (Join, BeginStep, EndStep, SendEnvelope, FetchEnvelope, Finish, Bundle)
}


def read_message(blob: bytes | memoryview) -> Any:
    """
    Deserialize a message of a client: a control message, or hidden states or gradients.

    Args:
        blob (`bytes`): The serialized message.

    Raises:
        ValueError: If the message is damaged, has an unknown kind, or has a field that is not declared.
    """
    return read_one_of(blob, {**CONTROL_MESSAGES, **REQUESTS})


# Kinds of the answers after which the server does not process the other messages of a bundle.
STOPPING_KINDS = (LateReply.kind, PeerRemovedReply.kind, ResendReply.kind)


def as_view(value: torch.Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor of a message, without a copy."""
    return value.numpy().data


def as_tensor(value: bytes) -> torch.Tensor:
    """Convert bytes to a uint8 tensor, which a message can hold."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.zeros(0, dtype=torch.uint8)


def as_bytes(value: torch.Tensor) -> bytes:
    """Convert a tensor that `as_tensor` returned back to bytes."""
    return value.numpy().tobytes()


# Limit of an averaging weight. The limit keeps the sums of a weighted mean finite, also in half precision.
MAX_NUM_EXAMPLES = 10**9


@dataclass(frozen=True)
class PartParameters(Serializable):
    """
    Client to client: the trained parameters of a head and a tail.

    The server that holds the body must not receive this message. With the head of a client the server could
    reconstruct the client's input from the hidden states.

    Args:
        client_id (`str`): The client that trained the parameters; empty for an average.
        step (`int`): Number of optimizer steps so far.
        num_rows (`int`): Examples trained since the last average, at most `MAX_NUM_EXAMPLES`. The number is not
            verified: the client that averages does not see the examples.
        state (`dict[str, torch.Tensor]`): The parameters, by name.

    Raises:
        ValueError: If a field has a wrong type, `num_rows` is out of range, or a parameter is not finite.
    """

    kind: ClassVar[str] = "split_parameters"
    checks_fields: ClassVar[bool] = True

    client_id: str
    step: Count
    num_rows: Annotated[int, Requirement("must have type int")]
    state: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        if type(self.num_rows) is int and not 0 <= self.num_rows <= MAX_NUM_EXAMPLES:
            raise ValueError(
                f"{self.kind}: num_rows of client {self.client_id!r} is {self.num_rows}. It must be between 0 and "
                f"{MAX_NUM_EXAMPLES}."
            )
        raise_problem(self.kind, problems_of(self))
        if (not_finite := first_non_finite(self.state)) is not None:
            raise ValueError(
                f"{self.kind}: {not_finite!r} of client {self.client_id!r} has NaN or infinite values at step "
                f"{self.step}. Lower the learning rate, or set max_grad_norm."
            )
