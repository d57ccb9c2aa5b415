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

from ..aggregation import Accumulator, Aggregation, WeightedMean
from ..distillation import Ask, Cohort, Distillation, DistillationServer, FromMain, Teachers
from ..messages import ClientUpdate
from ..messages.validation import CheckExtra


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
        check_extra (`Callable`, *optional*): Raises `ValueError` for one that looks so and holds numbers that the
            algorithm cannot use. The update is then refused.
        accumulators (`list[Accumulator]`): What this round's updates are added up in. Those that are listed here hold
            the updates of all processes when `on_aggregate` fires, and are dropped after it.
        client_metrics (`dict[str, dict[str, float]]`): What each accepted client reported of its training, with
            `num_examples`, `num_tokens` and `num_steps`; known from `on_aggregate` on.
        min_clients (`int`): Clients that a round needs.
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
    fit_settings: dict[str, Any] = field(default_factory=dict)
    fit_extra: dict[str, torch.Tensor] = field(default_factory=dict)
    expected_extra: dict[str, torch.Tensor] = field(default_factory=dict)
    check_extra: CheckExtra | None = None
    accumulators: list[Accumulator] = field(default_factory=list)
    client_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    min_clients: int = 1
    ask: Ask | None = None


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

    def __init__(self, algorithm: Aggregation) -> None:
        self.algorithm = algorithm
        self._accumulator: Accumulator | None = None

    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        assert self._accumulator is not None
        server.weights = self.algorithm.aggregate(self._accumulator, server.weights)
        # A round's sums are as large as the model; they must not lie about until the next round.
        self._accumulator = None


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

    def __init__(self, algorithm: Distillation) -> None:
        self.algorithm = algorithm
        # Of the last round, for the log.
        self.logs: dict[str, float] = {}
        self.teachers: Teachers | None = None
        self._server: DistillationServer | None = None
        self._from_main: FromMain | None = None
        # Whose updates were kept here in this round.
        self._kept: list[str] = []
        self._extra: WeightedMean | None = None

    def start(self, server: DistillationServer, teachers: Teachers | None, from_main: FromMain) -> None:
        """
        Called when a run begins.

        Args:
            server ([`DistillationServer`]): The server's model and rows.
            teachers ([`Teachers`], *optional*): Where clients' models are put, for a method that needs them.
            from_main (`Callable`): As of [`~hf_federated.distillation.Cohort`].
        """
        self.logs = {}
        self._server, self.teachers, self._from_main = server, teachers, from_main
        self.algorithm.setup(server.num_rounds)

    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        assert self._server is not None
        server.expected_extra.update(self.algorithm.expected_extra(self._server))
        server.check_extra = self.algorithm.check_extra
        self._kept = []

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        **kwargs: Any,
    ) -> None:
        if self.teachers is None or self._server is None:
            return
        if self.algorithm.uses_updates_of(update.round, self._server):
            self.teachers.keep(update)
            self._kept.append(update.client_id)

    def on_aggregate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        if self.algorithm.returns_parameters:
            self._extra = server.accumulators[0].extra

    def on_distill(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, server: ServerState, **kwargs: Any
    ) -> None:
        assert server.ask is not None
        assert self._server is not None and self._from_main is not None
        num_classes = self._server.student.num_classes
        cohort = Cohort(
            round=server.round,
            metrics=dict(server.client_metrics),
            ask=server.ask,
            decode=lambda values: self.algorithm.decode(values, num_classes),
            seed=self._server.seed,
            min_clients=server.min_clients,
            rejected=server.rejected,
            extra=self._extra,
            teachers=self.teachers,
            positions=self._server.student.positions,
            from_main=self._from_main,
        )
        if self.teachers is not None:
            self.teachers.settle(cohort.client_ids, self._kept)
        cohort.check_reports(lambda metrics: self.algorithm.check_report(metrics, num_classes))
        self.logs = self.algorithm.distill(cohort, self._server)
        if self._server.student.positions is not None:
            # Fewer than there are, where a tokenizer of the round keeps nothing of some words.
            self.logs["public_positions"] = self._server.num_agreed(self._server.all_rows)
        self._extra = None
        if self.teachers is not None and not self.algorithm.keeps_teachers(self._server):
            self.teachers.forget()
        server.weights = self._server.exchange.read()

    def state_dict(self) -> dict[str, Any]:
        """What the server keeps between rounds beside its model, as scalars and tensors."""
        assert self._server is not None
        return {"algorithm": self.algorithm.state_dict(), "student": self._server.student.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, before the first round."""
        assert self._server is not None
        self.algorithm.load_state_dict(state["algorithm"])
        self._server.student.load_state_dict(state["student"])
