"""Messages of local training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from .base import Message


# How a client names, among its metrics, the rows that it has of each class.
CLASS_COUNT = "class_count_"


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

    @property
    def reported_metrics(self) -> dict[str, float]:
        """The metrics with `num_examples`, `num_tokens` and `num_steps`."""
        counts = {"num_examples": self.num_examples, "num_tokens": self.num_tokens, "num_steps": self.num_steps}
        return {**self.metrics, **counts}

    def to(self, device: torch.device | None) -> ClientUpdate:
        """The update with its tensors on a device; `None` leaves the tensors where they are."""
        if device is None:
            return self
        state = {name: value.to(device) for name, value in self.state.items()}
        return replace(self, state=state, extra={name: value.to(device) for name, value in self.extra.items()})


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
