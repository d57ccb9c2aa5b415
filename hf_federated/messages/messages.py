"""What crosses a client's boundary, and its bytes.

Every exchange between server and client is one of the frozen dataclasses below. A message serialises to a single blob
(`packing.py`): a safetensors file with a JSON header, and never a pickle.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch

from .serialization import pack, packed_size, unpack


M = TypeVar("M", bound="Packed")

# How a client names, among its metrics, the rows that it has of each class.
CLASS_COUNT = "class_count_"


@dataclass(frozen=True)
class Packed:
    """
    A frozen dataclass that serialises to bytes: exactly its fields, and its kind.

    A subclass declares its fields and nothing else travels: [`~Packed.to_bytes`] serialises exactly these, and
    [`~Packed.from_bytes`] refuses a blob that holds others.
    """

    kind: ClassVar[str] = ""

    def to_tree(self) -> dict[str, Any]:
        """What is serialised: the kind and the fields, as a tree that `pack` takes."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {"kind": self.kind, "fields": fields}

    def to_bytes(self) -> bytes:
        """One blob of bytes: safetensors with a JSON header."""
        return pack(self.to_tree())

    @property
    def num_bytes(self) -> int:
        """`len(self.to_bytes())`, without serialising."""
        return packed_size(self.to_tree())

    @classmethod
    def from_bytes(cls: type[M], blob: bytes) -> M:
        """
        The message that `to_bytes` wrote.

        Raises:
            ValueError: If the blob is damaged, of another kind, or has other fields than this message declares.
        """
        return cls._from_tree(unpack(blob))

    @classmethod
    def _from_tree(cls: type[M], tree: Any) -> M:
        kind = tree.get("kind") if isinstance(tree, dict) else type(tree).__name__
        if kind != cls.kind:
            raise ValueError(f"Expected a message of kind {cls.kind!r}, got {kind!r}.")
        expected = {item.name for item in dataclasses.fields(cls)}
        fields = tree.get("fields")
        if not isinstance(fields, dict) or set(fields) != expected:
            given = list(fields) if isinstance(fields, dict) else fields
            raise ValueError(f"A {cls.kind!r} message has the fields {sorted(expected)}, got {given!r}.")
        return cls(**fields)


@dataclass(frozen=True)
class Message(Packed):
    """
    Base of what crosses a client's boundary in a round.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): The client at the other end.
    """

    round: int
    client_id: str


@dataclass(frozen=True)
class Fit(Message):
    """
    Server to client: train on your data from this state.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): To whom it goes.
        seed (`int`): What the client draws its randomness from, except for shuffling. Below 2**32.
        state (`dict[str, torch.Tensor]`): The global values of what is exchanged, by parameter name. Empty where the
            client goes on from a model of its own.
        extra (`dict[str, torch.Tensor]`): What the algorithm sends beside it, by parameter name (Scaffold: the server
            control variate). Empty for most.
        settings (`dict[str, Any]`): The algorithm's numbers for this round, JSON scalars only.
        returns_state (`bool`): Whether the update holds what training made of the state. Where clients keep models of
            their own and answer with predictions, it holds none.
        max_rows (`int`, *optional*): Rows to train on at most. Of more the client draws so many with its seed.
    """

    kind: ClassVar[str] = "fit"

    seed: int
    state: dict[str, torch.Tensor]
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    returns_state: bool = True
    max_rows: int | None = None


@dataclass(frozen=True)
class ClientUpdate(Message):
    """
    Client to server: what local training made of the state.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): From whom it comes.
        state (`dict[str, torch.Tensor]`): The trained values, with the keys, shapes and dtypes of the state received.
        num_examples (`int`): Rows that the client trained on, each counted once; of a stream, rows seen this round.
        num_tokens (`int`): Input tokens seen this round without padding; 0 when not counted.
        num_steps (`int`): Optimizer steps taken this round.
        metrics (`dict[str, float]`): Mean training loss, last gradient norm and learning rate, floating point
            operations, samples seen.
        extra (`dict[str, torch.Tensor]`): What the algorithm asks for beside the state (Scaffold: the change of the
            client's control variate).
    """

    kind: ClassVar[str] = "client_update"

    state: dict[str, torch.Tensor]
    num_examples: int
    num_tokens: int
    num_steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluate(Message):
    """
    Server to client: evaluate this state on your evaluation data.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): To whom it goes.
        state (`dict[str, torch.Tensor]`): The global values of what is exchanged, by parameter name.
    """

    kind: ClassVar[str] = "evaluate"

    state: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Metrics(Message):
    """
    Client to server: how the state did on the client's evaluation data.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): From whom it comes.
        num_examples (`int`): Rows evaluated.
        metrics (`dict[str, float]`): The client's metrics, named as `compute_metrics` names them, with `eval_` before.
    """

    kind: ClassVar[str] = "metrics"

    num_examples: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class PublicRowsMessage(Message):
    """
    Base of the messages about public rows, which both sides have: they are named by their places, and never sent.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): To whom it goes.
        order (`int`, *optional*): Seed of the order that `start` and `stop` count in, as [`public_order`] draws it;
            `None` for the rows as they are.
        start (`int`): First row.
        stop (`int`): The row after the last.
        seed (`int`): What the client draws its randomness from. Below 2**32.
    """

    order: int | None
    start: int
    stop: int
    seed: int


def public_order(num_rows: int, seed: int | None) -> torch.Tensor:
    """
    The order of the public rows that a seed stands for, the same wherever it is drawn.

    Args:
        num_rows (`int`): Public rows.
        seed (`int`, *optional*): `None` for the rows as they are.

    Returns:
        `torch.Tensor`: Row numbers, int64, of shape `(num_rows,)`.
    """
    if seed is None:
        return torch.arange(num_rows)
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Predict(PublicRowsMessage):
    """
    Server to client: predict these public rows with your own model.

    Args:
        round, client_id, order, start, stop, seed: As in [`PublicRowsMessage`].
        keeps_graph (`bool`): Whether a [`Feedback`] on the same rows follows, through which the client trains: the
            prediction is then a forward pass in training mode, with dropout drawn from `seed`.
    """

    kind: ClassVar[str] = "predict"

    keeps_graph: bool = False


@dataclass(frozen=True)
class Predictions(Message):
    """
    Client to server: what its model says of the rows asked for.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): From whom it comes.
        values (`dict[str, torch.Tensor]`): The predictions in the order of the rows, as the algorithm's codec writes
            them. Where words are predicted, those of each row in their order, and `absent`, if there are any: which of
            them, counted over all rows asked for, the client's tokenizer keeps nothing of (int32).
    """

    kind: ClassVar[str] = "predictions"

    values: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Distill(PublicRowsMessage):
    """
    Server to client: train your own model on these predictions of public rows. It answers with [`Metrics`].

    Args:
        round, client_id, order, start, stop, seed: As in [`PublicRowsMessage`].
        targets (`dict[str, torch.Tensor]`): What to learn of each row, in their order, as the algorithm's codec
            writes it. `absent` as in [`Predictions`]: words that some tokenizer of the cohort keeps nothing of.
        num_epochs (`int`): Passes over the rows.
        num_training_epochs (`int`): Passes over as many rows in all such messages of the run, for the learning-rate
            curve: how many steps that is depends on the client's batch size.
        settings (`dict[str, Any]`): The algorithm's numbers for this round, JSON scalars only.
    """

    kind: ClassVar[str] = "distill"

    targets: dict[str, torch.Tensor]
    num_epochs: int
    num_training_epochs: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Feedback(PublicRowsMessage):
    """
    Server to client: take one step on the predictions that you just sent of these rows. It answers with [`Metrics`].

    Args:
        round, client_id, order, start, stop, seed: As in the [`Predict`] that it follows.
        targets (`dict[str, torch.Tensor]`): What to learn of each row, in their order, as the algorithm's codec
            writes it. `absent` as in [`Predictions`]: words that some tokenizer of the cohort keeps nothing of.
        feedback (`dict[str, torch.Tensor]`): What the algorithm says of the client's predictions.
        step (`int`): How many such messages a client that is always asked has had before this one.
        num_training_steps (`int`): How many it has in the whole run, for the learning-rate curve.
        settings (`dict[str, Any]`): The algorithm's numbers for this client, JSON scalars only.
    """

    kind: ClassVar[str] = "feedback"

    targets: dict[str, torch.Tensor]
    feedback: dict[str, torch.Tensor]
    step: int
    num_training_steps: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientFailure(Message):
    """
    Client to server: the work asked for could not be done.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): From whom it comes.
        error (`str`): The error's class and text. It may name rows of the client's data only if the error did.
    """

    kind: ClassVar[str] = "client_failure"

    error: str


KINDS: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (Fit, ClientUpdate, Evaluate, Metrics, Predict, Predictions, Distill, Feedback, ClientFailure)
}


def message_from_tree(tree: Any) -> Message:
    """
    The message of whatever kind that a tree holds.

    Args:
        tree (`Any`): From [`~Message.to_tree`], or from `unpack`.

    Raises:
        ValueError: If its kind is unknown or it has other fields than the kind declares.
    """
    kind = tree.get("kind") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"Unknown kind of message {kind!r}; known are {sorted(KINDS)}.")
    return KINDS[kind]._from_tree(tree)


def read_message(blob: bytes) -> Message:
    """
    The message of whatever kind a blob holds.

    Raises:
        ValueError: If the blob is damaged or its kind is unknown.
    """
    return message_from_tree(unpack(blob))
