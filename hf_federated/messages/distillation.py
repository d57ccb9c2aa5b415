"""Messages of federated distillation: predictions for public examples, and targets for training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..utils.fields import Count, Seed
from .base import Message


@dataclass(frozen=True)
class PublicRowsMessage(Message):
    """
    Base class of the messages about public examples.

    The server and the clients have the same public dataset. A message refers to public examples by their positions
    and never contains the examples.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the receiving client.
        order (`int`, *optional*): Seed of the order of the examples, as drawn by [`public_order`]. `start` and `stop`
            are positions in this order. `None` is the order of the dataset.
        start (`int`): Position of the first example.
        stop (`int`): Position after the last example.
        seed (`int`): Seed of the random numbers of the client, below 2**32.
    """

    phase: ClassVar[int | None] = 1

    order: int | None
    start: Count
    stop: Count
    seed: Seed


def public_order(num_rows: int, seed: int | None) -> torch.Tensor:
    """
    Draw an order of the public examples from a seed. The order is the same on the server and on all clients.

    Args:
        num_rows (`int`): Number of public examples.
        seed (`int`, *optional*): Seed of the order. `None` is the order of the dataset.

    Returns:
        `torch.Tensor` of shape `(num_rows,)`: Indices of the examples, int64.
    """
    if seed is None:
        return torch.arange(num_rows)
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Predict(PublicRowsMessage):
    """
    Message from the server to a client: predict public examples with the model of the client.

    Args:
        round, client_id, order, start, stop, seed: As in [`PublicRowsMessage`].
        keeps_graph (`bool`, *optional*, defaults to `False`): Whether a [`Feedback`] on the same examples follows, for
            which the client needs the graph of this prediction. The prediction is then a forward pass in training
            mode, with dropout drawn from `seed`.
    """

    kind: ClassVar[str] = "predict"
    answered_by: ClassVar[str] = "predictions"

    keeps_graph: bool = False


@dataclass(frozen=True)
class Predictions(Message):
    """
    Message from a client to the server: predictions of the client for the requested public examples.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the sending client.
        values (`dict[str, torch.Tensor]`): Predictions in the order of the examples, encoded by the codec of the
            algorithm. For predictions of words, the words of each example are in their order. `absent` (int32) is
            present if the tokenizer of the client keeps no token of some words. It contains the positions of these
            words, counted over all requested examples.
    """

    kind: ClassVar[str] = "predictions"

    values: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Distill(PublicRowsMessage):
    """
    Message from the server to a client: train the model of the client on targets for public examples.

    The client replies with [`Metrics`].

    Args:
        round, client_id, order, start, stop, seed: As in [`PublicRowsMessage`].
        targets (`dict[str, torch.Tensor]`): Targets of the examples, in their order, encoded by the codec of the
            algorithm. `absent` has the form of [`Predictions`] and contains the words of which a tokenizer in the
            cohort keeps no token.
        num_epochs (`int`): Number of passes over the examples.
        num_training_epochs (`int`): Number of passes over this number of examples in all such messages of the run.
            The client derives the length of its learning-rate schedule from it, because the number of steps depends on
            the batch size of the client.
        settings (`dict[str, Any]`, *optional*): Settings of the algorithm for this round, JSON scalars only.
    """

    kind: ClassVar[str] = "distill"
    answered_by: ClassVar[str] = "metrics"

    targets: dict[str, torch.Tensor]
    num_epochs: Count
    num_training_epochs: Count
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Feedback(PublicRowsMessage):
    """
    Message from the server to a client: take one optimizer step on the predictions that the client just sent.

    The client replies with [`Metrics`].

    Args:
        round, client_id, order, start, stop, seed: As in the preceding [`Predict`].
        targets (`dict[str, torch.Tensor]`): Targets of the examples, in their order, encoded by the codec of the
            algorithm. `absent` has the form of [`Predictions`] and contains the words of which a tokenizer in the
            cohort keeps no token.
        feedback (`dict[str, torch.Tensor]`): Feedback of the algorithm on the predictions of the client.
        step (`int`): Number of preceding feedback messages of the run for a client that takes part in every round.
        num_training_steps (`int`): Number of feedback messages in the whole run for such a client. It is the length of
            the learning-rate schedule.
        settings (`dict[str, Any]`, *optional*): Settings of the algorithm for this client, JSON scalars only.
    """

    kind: ClassVar[str] = "feedback"
    answered_by: ClassVar[str] = "metrics"

    targets: dict[str, torch.Tensor]
    feedback: dict[str, torch.Tensor]
    step: Count
    num_training_steps: Count
    settings: dict[str, Any] = field(default_factory=dict)
