"""Events of a round, and the callbacks that run the algorithms.

A [`FederatedCallback`] is a `TrainerCallback` with six additional events. The events of a plain `TrainerCallback` fire
once a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..adapters import Exchange
from ..aggregation import Accumulator, Aggregation, WeightedMean
from ..aggregation.validation import check_aggregate
from ..distillation import Ask, Cohort, Distillation, DistillationServer, RunOnMain
from ..messages import ClientUpdate
from ..messages.validation import CheckExtra, first_non_finite
from ..utils.errors import RoundFailedError
from .bound_update import Group, GroupedAccumulator


def _no_engine(phase: str, client_ids: Sequence[str], message_for: Any) -> dict[str, Any]:
    raise RuntimeError(f"The {phase} phase needs an engine. Build a RoundLoop with this ServerState first.")


def _no_examples() -> ClientUpdate:
    raise RuntimeError("The server has no examples to train on. Pass `server_dataset` to the trainer.")


@dataclass
class ServerState:
    """
    State of the server in a round. Callbacks may change `weights`.

    Args:
        weights (`dict[str, torch.Tensor]`): The global values of the exchanged parameters, by name.
        round (`int`): Number of the current round, from 0.
        num_rounds (`int`): Number of rounds of the run.
        client_ids (`tuple[str, ...]`): Ids of all clients.
        cohort (`tuple[str, ...]`): Ids of the clients that are sampled in this round.
        rejected (`dict[str, str]`): Clients of this round that failed or whose update was rejected, with the reason.
        returns_state (`bool`): Whether updates contain the trained values of `weights`.
        fit_settings (`dict[str, Any]`): `settings` of the `Fit` messages of this round.
        fit_extra (`dict[str, torch.Tensor]`): `extra` of the `Fit` messages of this round.
        expected_extra (`dict[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of an update's `extra`.
        averaged_extra (`set[str]`): Names in `expected_extra` of the tensors that an averaging algorithm averages.
            Their norm is bounded as that of a change.
        extra_checks (`list[Callable]`): Functions of an update's `extra`. A function raises `ValueError` if an
            algorithm cannot use the values. The update is then rejected.
        update_checks (`list[Callable]`): Functions of an update. A function raises `ValueError` if an algorithm cannot
            use the update. The update is then rejected.
        grouped (`list[GroupedAccumulator]`): Sums of the updates that have arrived in this round, before it is known
            which updates are out of bounds.
        accumulators (`list[Accumulator]`): Sums of the accepted updates of this round, from `on_aggregate` on. Each
            accumulator contains the updates of all processes. The list is emptied after `on_aggregate`.
        client_metrics (`dict[str, dict[str, float]]`): Reported metrics of each accepted client, including
            `num_examples`, `num_tokens` and `num_steps`. Available from `on_aggregate` on.
        logs (`dict[str, float]`): Entries that callbacks add to the log of this round.
        min_clients (`int`): Minimum number of clients of a round.
        device (`torch.device`, *optional*): Device of `weights` and of the sums of updates. Defaults to the
            device of the model.
        shares_model (`bool`): Whether `weights` and the model share memory, because nothing trains the model.
        aggregated (`dict[str, torch.Tensor]`, *optional*): `weights` after this round's aggregation.
        train_on_server (`Callable`): `train_on_server()` trains the global model on the server's own examples, as a
            client would, and returns the [`ClientUpdate`].
        ask (`Callable`): `ask(phase, client_ids, message_for)` sends additional messages to clients and returns the
            replies by client id.

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
    averaged_extra: set[str] = field(default_factory=set)
    extra_checks: list[CheckExtra] = field(default_factory=list)
    update_checks: list[Callable[[ClientUpdate], None]] = field(default_factory=list)
    grouped: list[GroupedAccumulator] = field(default_factory=list)
    accumulators: list[Accumulator] = field(default_factory=list)
    client_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    min_clients: int = 1
    device: torch.device | None = None
    shares_model: bool = False
    aggregated: dict[str, torch.Tensor] | None = None
    train_on_server: Callable[[], ClientUpdate] = field(default_factory=lambda: _no_examples)
    ask: Ask = field(default_factory=lambda: _no_engine)

    def begin_round(self, round: int, cohort: tuple[str, ...]) -> None:
        """Set the round and its cohort, and reset the state of the previous round."""
        self.round, self.cohort = round, cohort
        self.rejected, self.fit_settings, self.fit_extra, self.expected_extra = {}, {}, {}, {}
        self.averaged_extra, self.logs = set(), {}
        self.extra_checks, self.update_checks, self.grouped, self.accumulators = [], [], [], []
        self.aggregated = None

    def read(self, exchange: Exchange) -> dict[str, torch.Tensor]:
        """Return the exchanged parameters of a model on the server's device, as a copy unless the model is shared."""
        if self.shares_model:
            return exchange.tensors
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

    Each event receives `args`, `state` and `control` like the events of `TrainerCallback`. `server` (a
    [`ServerState`]), `model` and the arguments of the event are passed by keyword. An event may return a changed
    `control`.

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
        """Called before the messages of the cohort are built. `server.cohort` is set."""

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
        """Called when the message of a client is sent."""

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
        Called for each update that passes the checks. Do not keep a reference to the update, or memory grows with the
        cohort.

        An update whose change is too large is rejected when all updates have arrived (`max_update_ratio`).
        `server.rejected` then contains its client in `on_aggregate`.

        With several processes and `parallelism="clients"`, the event fires only in the process that trained the
        client. Changes of `control` apply to all processes at the end of the round.
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
        """Called when all updates have arrived. The aggregating callback sets `server.weights`."""

    def on_distill(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        server: ServerState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called after aggregation, when the model contains `server.weights`."""

    def on_round_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        server: ServerState,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called after the logging, evaluation and saving of the round, as the training arguments define them."""


def call_event(
    callbacks: Sequence[TrainerCallback],
    event: str,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    **kwargs: Any,
) -> TrainerControl:
    """Fire an event of a round on all instances of [`FederatedCallback`], in order."""
    for callback in callbacks:
        if isinstance(callback, FederatedCallback):
            control = getattr(callback, event)(args, state, control, **kwargs) or control
    return control


class AggregationCallback(FederatedCallback):
    """
    Runs an averaging algorithm. The trainer adds this callback for `aggregation` of [`FederatedConfig`].

    Args:
        algorithm ([`Aggregation`]): The algorithm.

    Example:

    ```python
    >>> from hf_federated import AggregationCallback, FedAvg

    >>> AggregationCallback(FedAvg()).algorithm
    FedAvg()
    ```
    """

    # Position of the means in the lists of the server, in this round.
    _position: int

    def __init__(self, algorithm: Aggregation) -> None:
        self.algorithm = algorithm

    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        # Every algorithm adds its tensors to `expected_extra` in this event, so the dictionary is complete afterwards.
        expected_state, expected_extra = server.expected_state, server.expected_extra
        self._position = len(server.grouped)
        server.grouped.append(
            GroupedAccumulator(lambda: self.algorithm.accumulator(expected_state, expected_extra), server.cohort)
        )
        server.extra_checks.append(self.algorithm.check_extra)
        server.update_checks.append(self.algorithm.check_update)
        server.fit_settings.update(self.algorithm.fit_settings())
        server.fit_extra.update(self.algorithm.fit_extra(server.weights))
        own_extra = self.algorithm.expected_extra(server.weights)
        server.expected_extra.update(own_extra)
        server.averaged_extra.update(own_extra)
        if self.algorithm.trains_on_server:
            self.algorithm.on_server_update(server.train_on_server())

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        *,
        server: ServerState,
        group: Group = (),
        **kwargs: Any,
    ) -> None:
        server.grouped[self._position].add(update, group)

    def on_aggregate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        aggregated = self.algorithm.aggregate(server.accumulators[self._position], server.weights)
        check_aggregate(self.algorithm, aggregated, server.weights)
        if (name := first_non_finite(aggregated)) is not None:
            raise RoundFailedError(
                f"Round {server.round + 1}: {self.algorithm!r} computed NaN or infinite values for {name!r} from "
                "finite updates. Lower the learning rate of the server."
            )
        server.weights = aggregated


class DistillationCallback(FederatedCallback):
    """
    Runs a distillation algorithm after the clients' local training.

    The trainer adds this callback for `distillation` of [`FederatedConfig`].

    Args:
        algorithm ([`Distillation`]): The algorithm.

    Example:

    ```python
    >>> from hf_federated import DistillationCallback, DSFL

    >>> DistillationCallback(DSFL()).algorithm
    DSFL()
    ```
    """

    # The server side of the distillation, set by `start`.
    server: DistillationServer

    def __init__(self, algorithm: Distillation) -> None:
        self.algorithm = algorithm
        self.logs: dict[str, float] = {}
        self._extra = WeightedMean()

    def start(self, server: DistillationServer, run_on_main: RunOnMain) -> None:
        """
        Start a run.

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
        # Raises an error with the name of the model if the server's model does not predict classes.
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
            for client_id in server.rejected:
                self.server.teachers.discard_received(client_id)
            self.server.teachers.discard_outdated(cohort.client_ids)
        cohort.check_reports(lambda metrics: self.algorithm.check_report(metrics, num_classes))
        self.logs = self.algorithm.distill(cohort, self.server)
        if student.positions is not None:
            # Less than the number of positions if a tokenizer of the cohort drops words.
            self.logs["public_positions"] = self.server.num_agreed(self.server.all_rows)
        self._extra = WeightedMean()
        server.weights = server.read(self.server.exchange)

    def state_dict(self) -> dict[str, Any]:
        """State that the server keeps between rounds in addition to its model, as scalars and tensors."""
        return {"algorithm": self.algorithm.state_dict(), "student": self.server.student.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the return value of `state_dict`, before the first round."""
        self.algorithm.load_state_dict(state["algorithm"])
        self.server.student.load_state_dict(state["student"])
