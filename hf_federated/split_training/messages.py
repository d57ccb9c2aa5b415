"""What clients and server of a networked run say to each other beside hidden states and gradients.

Every message names the client that sends it or that is answered; each field is checked. What clients send one another
is sealed (`split/envelope.py`): the server carries it and knows its size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..messages.messages import Packed
from ..messages.serialization import unpack
from ..split.messages import REQUESTS


@dataclass(frozen=True)
class Control(Packed):
    """
    Base of what clients and server say about the run.

    Args:
        client_id (`str`): The client at one end.
    """

    client_id: str

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not _fits(item.name, value):
                raise ValueError(f"{self.kind}: {item.name} is no such value: {type(value).__name__}.")


# What each field holds, whatever message it is in.
_TEXTS = {"client_id", "digest", "recipient", "sender"}
_COUNTS = {"step", "num_steps", "num_rows", "num_batches", "resume_step"}
_BYTES = {"introduction", "sealed"}


def _fits(name: str, value: Any) -> bool:
    if name in _TEXTS:
        return type(value) is str
    if name in _COUNTS:
        return type(value) is int and value >= 0
    if name in _BYTES:
        return isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.ndim == 1
    if name == "checkpoints":
        return isinstance(value, list) and all(type(own) is int and own > 0 for own in value)
    if name == "steps_of":
        return isinstance(value, dict) and all(type(own) is int and own > 0 for own in value.values())
    if name == "introductions":
        return isinstance(value, dict) and all(_fits("sealed", own) for own in value.values())
    # A squared norm, or a norm: NaN is for the server to see.
    return type(value) is float and not value < 0


@dataclass(frozen=True)
class Join(Control):
    """
    Client to server: it will train.

    Args:
        digest (`str`): Of all settings that parties must have in common.
        num_steps (`int`): Optimizer steps that its rows make in an epoch.
        checkpoints (`list[int]`): Steps of the checkpoints that it can go on from.
        introduction (`torch.Tensor`): To other clients; uint8, empty where nothing is sealed for them.
    """

    kind: ClassVar[str] = "split_join"

    digest: str
    num_steps: int
    checkpoints: list[int]
    introduction: torch.Tensor


@dataclass(frozen=True)
class Joined(Control):
    """
    Server to client: everybody is there.

    Args:
        resume_step (`int`): The last step of which everybody has a checkpoint; 0 begins anew.
        steps_of (`dict[str, int]`): Steps of each client in an epoch, in the clients' order.
        introductions (`dict[str, torch.Tensor]`): By client.
    """

    kind: ClassVar[str] = "split_joined"

    resume_step: int
    steps_of: dict[str, int]
    introductions: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Begin(Control):
    """
    Client to server: it will train in this step, and asks whether it is time.

    Args:
        step (`int`): Optimizer steps done before it.
        num_batches (`int`): Passages that it will make; 0 only waits until it is time.
        num_rows (`int`): Its rows in the step, by which replicas of the body are averaged: no more than those of its
            passages.
    """

    kind: ClassVar[str] = "split_begin"

    step: int
    num_batches: int
    num_rows: int


@dataclass(frozen=True)
class Begun(Control):
    """Server to client: it is time."""

    kind: ClassVar[str] = "split_begun"

    step: int


@dataclass(frozen=True)
class Step(Control):
    """
    Client to server: all gradients of the step are there.

    Args:
        step (`int`): Which.
        squared_norm (`float`): Of the gradients of its head and tail.
    """

    kind: ClassVar[str] = "split_step"

    step: int
    squared_norm: float


@dataclass(frozen=True)
class Stepped(Control):
    """
    Server to client: the server has stepped.

    Args:
        step (`int`): Which.
        norm (`float`): Of the gradients of everybody who shares the step, by which each clips.
    """

    kind: ClassVar[str] = "split_stepped"

    step: int
    norm: float


@dataclass(frozen=True)
class Late(Control):
    """Server to client: others waited for it as long as they may, and the step goes on without it."""

    kind: ClassVar[str] = "split_late"

    step: int


@dataclass(frozen=True)
class Send(Control):
    """
    Client to server: an envelope for another client.

    Args:
        step (`int`): Optimizer steps done before.
        recipient (`str`): For whom.
        sealed (`torch.Tensor`): The envelope; uint8.
    """

    kind: ClassVar[str] = "split_send"

    step: int
    recipient: str
    sealed: torch.Tensor


@dataclass(frozen=True)
class Sent(Control):
    """Server to client: it keeps the envelope until it is fetched."""

    kind: ClassVar[str] = "split_sent"

    step: int


@dataclass(frozen=True)
class Fetch(Control):
    """
    Client to server: it waits for an envelope.

    Args:
        step (`int`): Optimizer steps done before.
        sender (`str`): From whom.
    """

    kind: ClassVar[str] = "split_fetch"

    step: int
    sender: str


@dataclass(frozen=True)
class Fetched(Control):
    """
    Server to client: the envelope.

    Args:
        step (`int`): Optimizer steps done before.
        sender (`str`): From whom.
        sealed (`torch.Tensor`): The envelope; uint8.
    """

    kind: ClassVar[str] = "split_fetched"

    step: int
    sender: str
    sealed: torch.Tensor


@dataclass(frozen=True)
class Finish(Control):
    """Client to server: it is done, and asks for nothing any more."""

    kind: ClassVar[str] = "split_finish"

    step: int


CONTROLS: dict[str, type[Control]] = {own.kind: own for own in (Join, Begin, Step, Send, Fetch, Finish)}


def read_message(blob: bytes) -> Any:
    """
    What a client sent: of the run, or a passage.

    Raises:
        ValueError: If it is damaged, of another kind, or holds a field that is not declared.
    """
    tree = unpack(blob)
    kind = tree.get("kind") if isinstance(tree, dict) else None
    kinds: dict[str, Any] = {**CONTROLS, **REQUESTS}
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"A server takes messages of the kinds {sorted(kinds)}, got {kind!r}.")
    return kinds[kind]._from_tree(tree)


def as_tensor(value: bytes) -> torch.Tensor:
    """Bytes as a field of a message."""
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.zeros(0, dtype=torch.uint8)


def as_bytes(value: torch.Tensor) -> bytes:
    """What `as_tensor` made a tensor of."""
    return value.numpy().tobytes()


# By which parts are weighed: with any number of clients the sums of a mean stay numbers, also those of half precision.
MAX_ROWS = 10**9


@dataclass(frozen=True)
class PartParameters(Packed):
    """
    Client to client, or to whoever averages: what trains of a head and a tail.

    It is not for the server that holds the body: with a client's head it could read that client's hidden states.

    Args:
        client_id (`str`): Whose.
        step (`int`): Optimizer steps done before.
        num_rows (`int`): Rows trained since the parts were averaged last, at most `MAX_ROWS`. Clients take each
            other's word for it: who averages does not see the rows.
        state (`dict[str, torch.Tensor]`): The parameters, by name.
    """

    kind: ClassVar[str] = "split_parameters"

    client_id: str
    step: int
    num_rows: int
    state: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        for name, kind in (("client_id", str), ("step", int), ("num_rows", int), ("state", dict)):
            if type(getattr(self, name)) is not kind:
                raise ValueError(f"{self.kind}: {name} must be {kind.__name__}.")
        if not 0 <= self.num_rows <= MAX_ROWS:
            raise ValueError(
                f"{self.kind}: num_rows of client {self.client_id!r} is {self.num_rows}, which is to be from 0 to "
                f"{MAX_ROWS}."
            )
        for name, value in self.state.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{self.kind}: {name!r} is no tensor.")
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(
                    f"{self.kind}: {name!r} of client {self.client_id!r} holds NaN or infinite values at step "
                    f"{self.step}. Lower the learning rate, or set max_grad_norm."
                )
