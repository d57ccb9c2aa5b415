"""Messages of local training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import torch

from ..utils.fields import MAX_METRICS, Constraint, Count, MaxEntries, Seed, ShortText
from .base import Message


# Prefix of the metrics that contain the number of examples of a client per class.
CLASS_COUNT = "class_count_"
# The log of a run repeats the names of metrics in each round.
MAX_METRIC_CHARACTERS = 300_000


@dataclass(frozen=True)
class _MaxNameCharacters(Constraint):
    """Largest number of characters of all keys of a dictionary together."""

    number: int

    def problem(self, value: Any) -> str | None:
        total = sum(map(len, value))
        if total <= self.number:
            return None
        return f"has {len(value)} names with {total} characters together, at most {self.number} are allowed"


# Values may be NaN or infinite, such as the loss of a client that has diverged.
MetricValues = Annotated[dict[str, float], MaxEntries(MAX_METRICS), _MaxNameCharacters(MAX_METRIC_CHARACTERS)]


@dataclass(frozen=True)
class Fit(Message):
    """
    Message from the server to a client: train on the data of the client, starting from this state.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the receiving client.
        seed (`int`): Seed of the random numbers of the client, except for shuffling. Below 2**32.
        state (`dict[str, torch.Tensor]`): Global values of the exchanged tensors, by parameter name. Empty if the
            client keeps its own model and continues to train it.
        extra (`dict[str, torch.Tensor]`, *optional*): Additional tensors of the algorithm, by parameter name. For
            Scaffold, the control variate of the server. Empty for most algorithms.
        settings (`dict[str, Any]`, *optional*): Settings of the algorithm for this round, JSON scalars only.
        returns_state (`bool`, *optional*, defaults to `True`): Whether the update contains the trained state. It is
            `False` if clients keep their own models and reply with predictions.
        max_rows (`int`, *optional*): Maximum number of examples to train on. A client with more examples draws this
            number of them with its seed.
        accepted_round (`int`, *optional*): The last round whose update of this client the server used. A client whose
            last update is of another round restores what it kept before that update. It is sent only to clients whose
            postprocessors change this message, and only after a first accepted update.
    """

    kind: ClassVar[str] = "fit"
    answered_by: ClassVar[str] = "client_update"
    phase: ClassVar[int | None] = 0
    optional_fields: ClassVar[tuple[str, ...]] = ("accepted_round",)

    seed: Seed
    state: dict[str, torch.Tensor]
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    returns_state: bool = True
    max_rows: Count | None = None
    accepted_round: Count | None = None


@dataclass(frozen=True)
class ClientUpdate(Message):
    """
    Message from a client to the server: result of local training.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the sending client.
        state (`dict[str, torch.Tensor]`): Trained values, with the keys, shapes and dtypes of the received state.
        num_examples (`int`): Number of examples that the client trained on, each counted once. For a streaming
            dataset, the number of examples seen in this round.
        num_tokens (`int`): Number of input tokens seen in this round, without padding. 0 if tokens are not counted.
        num_steps (`int`): Number of optimizer steps in this round.
        metrics (`dict[str, float]`, *optional*): Mean training loss, last gradient norm and learning rate, number of
            floating point operations, and number of samples seen.
        extra (`dict[str, torch.Tensor]`, *optional*): Additional tensors that the algorithm requires. For Scaffold,
            the change of the control variate of the client.
    """

    kind: ClassVar[str] = "client_update"

    state: dict[str, torch.Tensor]
    num_examples: Count
    num_tokens: Count
    num_steps: Count
    metrics: MetricValues = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def reported_metrics(self) -> dict[str, float]:
        """The metrics, together with `num_examples`, `num_tokens` and `num_steps`."""
        counts = {"num_examples": self.num_examples, "num_tokens": self.num_tokens, "num_steps": self.num_steps}
        return {**self.metrics, **counts}

    def to(self, device: torch.device | None) -> ClientUpdate:
        """Return the update with its tensors on a device. `None` keeps the devices of the tensors."""
        if device is None:
            return self
        state = {name: value.to(device) for name, value in self.state.items()}
        return replace(self, state=state, extra={name: value.to(device) for name, value in self.extra.items()})


@dataclass(frozen=True)
class Evaluate(Message):
    """
    Message from the server to a client: evaluate a state on the evaluation data of the client.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the receiving client.
        state (`dict[str, torch.Tensor]`): Global values of the exchanged tensors, by parameter name.
    """

    kind: ClassVar[str] = "evaluate"
    answered_by: ClassVar[str] = "metrics"

    state: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Metrics(Message):
    """
    Message from a client to the server: metrics of a requested evaluation or training step.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the sending client.
        num_examples (`int`): Number of examples, for example of the evaluation data.
        metrics (`dict[str, float]`): Metrics of the client. Metrics of an evaluation have the names of
            `compute_metrics` with the prefix `eval_`.
    """

    kind: ClassVar[str] = "metrics"

    num_examples: Count
    metrics: MetricValues


@dataclass(frozen=True)
class ClientFailure(Message):
    """
    Message from a client to the server: the client could not handle a message.

    Args:
        round (`int`): Round number, from 0.
        client_id (`str`): Id of the sending client.
        error (`str`): Class of the error, and the place in the library where it occurred. The text of the error stays
            on the client, because it may contain an example.
    """

    kind: ClassVar[str] = "client_failure"

    error: ShortText
