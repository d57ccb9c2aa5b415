"""Messages of federated distillation: predictions of public examples, and targets to learn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from .base import Message


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
