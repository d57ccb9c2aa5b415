"""Events of a round, and the callbacks through which algorithms run.

A [`FederatedCallback`] is a `TrainerCallback` with six more events. An ordinary `TrainerCallback` keeps working: its
events fire once a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..adapters import Exchange
from ..aggregation import Accumulator, Aggregation, WeightedMean
from ..distillation import Ask, Cohort, Distillation, DistillationServer, RunOnMain
from ..messages import ClientUpdate
from ..messages.validation import CheckExtra


def _no_engine(phase: str, client_ids: Sequence[str], message_for: Any) -> dict[str, Any]:
    raise RuntimeError(f"The {phase} needs an engine; a ServerState gets one when its round loop is built.")


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
        returns_state (`bool`): Whether updates hold the trained values of `weights`.
        fit_settings (`dict[str, Any]`): Goes into the `settings` of this round's `Fit` messages.
        fit_extra (`dict[str, torch.Tensor]`): Goes into their `extra`.
        expected_extra (`dict[str, torch.Tensor]`): What an update's `extra` must look like.
        extra_checks (`list[Callable]`): Functions of an update's `extra`. Each raises `ValueError` for values that an
            algorithm cannot use; the update is then refused.
        accumulators (`list[Accumulator]`): What this round's updates are added up in. Those that are listed here hold
            the updates of all processes when `on_aggregate` fires, and are dropped after it.
        client_metrics (`dict[str, dict[str, float]]`): What each accepted client reported of its training, with
            `num_examples`, `num_tokens` and `num_steps`; known from `on_aggregate` on.
        min_clients (`int`): Number of clients that a round needs.
        device (`torch.device`, *optional*): Device of `weights` and of the sums of updates; the model's by default.
        aggregated (`dict[str, torch.Tensor]`, *optional*): `weights` after this round's aggregation.
        ask (`Callable`): `ask(phase, client_ids, message_for)` sends clients further messages and returns their
            replies by client.

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
    returns_state: bool = True
    fit_settings: dict[str, Any] = field(default_factory=dict)
    fit_extra: dict[str, torch.Tensor] = field(default_factory=dict)
    expected_extra: dict[str, torch.Tensor] = field(default_factory=dict)
    extra_checks: list[CheckExtra] = field(default_factory=list)
    accumulators: list[Accumulator] = field(default_factory=list)
    client_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    min_clients: int = 1
    device: torch.device | None = None
    aggregated: dict[str, torch.Tensor] | None = None
    ask: Ask = field(default_factory=lambda: _no_engine)

    def begin_round(self, round: int, cohort: tuple[str, ...]) -> None:
        """Set the round and its cohort, and forget the previous round."""
        self.round, self.cohort = round, cohort
        self.rejected, self.fit_settings, self.fit_extra, self.expected_extra = {}, {}, {}, {}
        self.extra_checks, self.accumulators = [], []
        self.aggregated = None

    def read(self, exchange: Exchange) -> dict[str, torch.Tensor]:
        """A copy of a model's exchanged values on the server's device."""
        if self.device is None:
            return exchange.read()
        return {name: value.to(self.device, copy=True) for name, value in exchange.tensors.items()}

    @property
    def expected_state(self) -> dict[str, torch.Tensor]:
        """Tensors with the names, shapes and dtypes of an update's state."""
        return self.weights if self.returns_state else {}


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
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        server: ServerState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Before the cohort's messages are made; `server.cohort` is known."""

    def on_client_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        client_id: str,
        *,
        server: ServerState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """When a client's message goes out."""

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        *,
        server: ServerState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """
        For each accepted update. An update must not be kept: memory would grow with the cohort.

        With several processes and `parallelism="clients"` it fires where the client was trained, and nowhere else.
        What it sets in `control` counts for all processes at the end of the round.
        """

    def on_aggregate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        server: ServerState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """When all updates are in; whoever aggregates sets `server.weights`."""

    def on_distill(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        server: ServerState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """After aggregation; the model holds `server.weights`."""

    def on_round_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        server: ServerState,
        **kwargs: Any,
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

    # This round's means, from `on_round_begin` to `on_aggregate`.
    _accumulator: Accumulator

    def __init__(self, algorithm: Aggregation) -> None:
        self.algorithm = algorithm

    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        # `expected_extra` is complete after this event, when every algorithm of the round has added to it.
        self._accumulator = self.algorithm.accumulator(server.expected_state, server.expected_extra)
        server.accumulators.append(self._accumulator)
        server.extra_checks.append(self.algorithm.check_extra)
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
        self._accumulator.add(update)

    def on_aggregate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        server.weights = self.algorithm.aggregate(self._accumulator, server.weights)
        # The sums are as large as the model and are not needed until the next round.
        del self._accumulator


class DistillationCallback(FederatedCallback):
    """
    Runs a distillation algorithm after the clients' local training. `distillation=` of [`FederatedConfig`] installs
    it.

    Args:
        algorithm ([`Distillation`]): The algorithm.

    Example:

    ```python
    >>> from hf_federated import DistillationCallback, DSFL

    >>> DistillationCallback(DSFL()).algorithm
    DSFL()
    ```
    """

    # The server's side of the distillation, from `start` on.
    server: DistillationServer

    def __init__(self, algorithm: Distillation) -> None:
        self.algorithm = algorithm
        self.logs: dict[str, float] = {}
        self._extra: WeightedMean | None = None

    def start(self, server: DistillationServer, run_on_main: RunOnMain) -> None:
        """
        Begin a run.

        Args:
            server ([`DistillationServer`]): The server's model and examples.
            run_on_main (`Callable`): As in [`~hf_federated.distillation.Cohort`].
        """
        self.logs = {}
        self.server, self._run_on_main = server, run_on_main
        self.algorithm.setup(server.num_rounds)

    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        server.expected_extra.update(self.algorithm.expected_extra(self.server))
        server.extra_checks.append(self.algorithm.check_extra)
        if self.server.teachers is not None:
            self.server.teachers.begin_round()

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        **kwargs: Any,
    ) -> None:
        self.algorithm.on_update(update, self.server)

    def on_aggregate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        if self.algorithm.returns_parameters:
            self._extra = server.accumulators[0].extra

    def on_distill(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        student = self.server.student
        # Fails here, by name, if the server's model does not predict classes.
        num_classes = student.num_classes
        cohort = Cohort(
            round=server.round,
            metrics=dict(server.client_metrics),
            ask=server.ask,
            decode=lambda values: self.algorithm.decode(values, num_classes),
            seed=self.server.seed,
            min_clients=server.min_clients,
            rejected=server.rejected,
            extra=self._extra,
            teachers=self.server.teachers,
            positions=student.positions,
            run_on_main=self._run_on_main,
        )
        if self.server.teachers is not None:
            self.server.teachers.discard_outdated(cohort.client_ids)
        cohort.check_reports(lambda metrics: self.algorithm.check_report(metrics, num_classes))
        self.logs = self.algorithm.distill(cohort, self.server)
        if student.positions is not None:
            # Lower than the number of positions if a tokenizer of the cohort drops some words.
            self.logs["public_positions"] = self.server.num_agreed(self.server.all_rows)
        self._extra = None
        server.weights = server.read(self.server.exchange)

    def state_dict(self) -> dict[str, Any]:
        """The state that the server keeps between rounds in addition to its model, as scalars and tensors."""
        return {"algorithm": self.algorithm.state_dict(), "student": self.server.student.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the return value of `state_dict`, before the first round."""
        self.algorithm.load_state_dict(state["algorithm"])
        self.server.student.load_state_dict(state["student"])
