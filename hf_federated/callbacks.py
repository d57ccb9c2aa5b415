"""Events of a round, and the callback through which averaging algorithms run.

A [`FederatedCallback`] is a `TrainerCallback` with six more events. An ordinary `TrainerCallback` keeps working: its
events fire once a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .aggregation import Accumulator, Aggregation
from .messages import ClientUpdate


@dataclass
class ServerState:
    """
    What the server knows in a round. Callbacks may change `weights`.

    Args:
        weights (`dict[str, torch.Tensor]`): The global values of what is exchanged, by parameter name.
        round (`int`): The round that is running, from 0.
        num_rounds (`int`): Rounds of the run.
        client_ids (`tuple[str, ...]`): All clients.
        cohort (`tuple[str, ...]`): The clients sampled this round.
        rejected (`dict[str, str]`): This round's clients that failed or whose update was refused, with the reason.
        fit_settings (`dict[str, Any]`): Goes into the `settings` of this round's `Fit` messages.
        fit_extra (`dict[str, torch.Tensor]`): Goes into their `extra`.
        expected_extra (`dict[str, torch.Tensor]`): What an update's `extra` must look like.
        accumulators (`list[Accumulator]`): What this round's updates are added up in. Those that are listed here hold
            the updates of all processes when `on_aggregate` fires.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated import ServerState

    >>> ServerState({"w": torch.zeros(1)}, num_rounds=3).round
    0
    ```
    """

    weights: dict[str, torch.Tensor]
    round: int = 0
    num_rounds: int = 0
    client_ids: tuple[str, ...] = ()
    cohort: tuple[str, ...] = ()
    rejected: dict[str, str] = field(default_factory=dict)
    fit_settings: dict[str, Any] = field(default_factory=dict)
    fit_extra: dict[str, torch.Tensor] = field(default_factory=dict)
    expected_extra: dict[str, torch.Tensor] = field(default_factory=dict)
    accumulators: list[Accumulator] = field(default_factory=list)


class FederatedCallback(TrainerCallback):
    """
    A `TrainerCallback` with the events of a round.

    Each event gets `args`, `state` and `control` as every callback does, `server` (a [`ServerState`]) and `model` by
    keyword, and what is named below. It may return a changed `control`.

    Example:

    ```python
    >>> from hf_federated import FederatedCallback

    >>> class CountExamples(FederatedCallback):
    ...     total = 0
    ...
    ...     def on_client_end(self, args, state, control, update, **kwargs):
    ...         self.total += update.num_examples
    ```
    """

    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Before the cohort's messages are made; `server.cohort` is known."""

    def on_client_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, client_id: str, **kwargs: Any
    ) -> TrainerControl | None:
        """When a client's message goes out."""

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """
        For each accepted update. An update must not be kept: memory would grow with the cohort.

        With several processes and `parallelism="clients"` it fires where the client was trained, and nowhere else.
        What it sets in `control` counts for all processes at the end of the round.
        """

    def on_aggregate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """When all updates are in; whoever aggregates sets `server.weights`."""

    def on_distill(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """After aggregation; the model holds `server.weights`."""

    def on_round_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """After the round was evaluated, logged and saved as the arguments say."""


def call_event(
    callbacks: Sequence[TrainerCallback],
    event: str,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    **kwargs: Any,
) -> TrainerControl:
    """Fire an event of a round on those callbacks that know it, in order."""
    for callback in callbacks:
        if isinstance(callback, FederatedCallback):
            control = getattr(callback, event)(args, state, control, **kwargs) or control
    return control


class AggregationCallback(FederatedCallback):
    """
    Runs an averaging algorithm over the events of a round. `aggregation=` of [`FederatedConfig`] installs it.

    Args:
        algorithm ([`Aggregation`]): The algorithm.

    Example:

    ```python
    >>> from hf_federated import AggregationCallback, FedAvg

    >>> AggregationCallback(FedAvg()).algorithm
    FedAvg()
    ```
    """

    def __init__(self, algorithm: Aggregation) -> None:
        self.algorithm = algorithm
        self._accumulator: Accumulator | None = None

    def on_round_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        server: ServerState | None = None,
        **kwargs: Any,
    ) -> None:
        assert server is not None
        self._accumulator = self.algorithm.accumulator()
        server.accumulators.append(self._accumulator)
        server.fit_settings.update(self.algorithm.fit_settings())
        server.fit_extra.update(self.algorithm.fit_extra(server.weights))
        server.expected_extra.update(self.algorithm.expected_extra(server.weights))

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        **kwargs: Any,
    ) -> None:
        assert self._accumulator is not None
        self._accumulator.add(update)

    def on_aggregate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        server: ServerState | None = None,
        **kwargs: Any,
    ) -> None:
        assert server is not None and self._accumulator is not None
        server.weights = self.algorithm.aggregate(self._accumulator, server.weights)
        # A round's sums are as large as the model; they must not lie about until the next round.
        server.accumulators.remove(self._accumulator)
        self._accumulator = None
