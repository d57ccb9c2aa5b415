"""Events of a round, and the callbacks that install algorithms.

A [`FederatedCallback`] is a `TrainerCallback` with six additional events. The events of a plain `TrainerCallback` fire
once a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..aggregation import Aggregation
from ..distillation import Distillation
from ..messages import ClientUpdate
from ..methods import Round


class FederatedCallback(TrainerCallback):
    """
    A `TrainerCallback` with the events of a round.

    Use it to observe a round: to log a value of your method, to save a client's metrics, or to stop the run when the
    clients no longer agree.

    Each event receives `args`, `state` and `control` like the events of `TrainerCallback`. `round` (a [`Round`]),
    `model` and the arguments of the event are passed by keyword. An event may return a changed `control`. Callbacks
    observe the round and add values to `round.logs`; a [`Method`] changes the round.

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
        round: Round,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called before the first message of the round. `round.cohort` is set."""

    def on_client_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        client_id: str,
        *,
        round: Round,
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
        round: Round,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """
        Called for each update that passes the checks. Do not keep a reference to the update, or memory grows with the
        cohort.

        It is not called with `secure_aggregation`, because the server has no update of a single client.

        An update whose change is too large is rejected when all updates have arrived (`max_update_ratio`).
        `round.rejected` then contains its client in `on_aggregate`.

        With several processes and `parallelism="clients"`, the event fires only in the process that trained the
        client. Changes of `control` apply to all processes at the end of the round.
        """

    def on_aggregate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        round: Round,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called when all updates have arrived, before the aggregation. `round.sums` contains the accepted updates."""

    def on_distill(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        round: Round,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called after the aggregation and before the distillation, when the model contains `round.state`."""

    def on_round_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        round: Round,
        **kwargs: Any,
    ) -> TrainerControl | None:
        """Called after the logging, evaluation and saving of the round, as the training arguments define them."""


def call_event(
    callbacks: Sequence[FederatedCallback],
    event: str,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    **kwargs: Any,
) -> TrainerControl:
    """Fire an event of a round on all callbacks, in order."""
    for callback in callbacks:
        control = getattr(callback, event)(args, state, control, **kwargs) or control
    return control


class AggregationCallback(FederatedCallback):
    """
    Installs an averaging algorithm. It replaces `aggregation` of [`FederatedConfig`].

    Use it if a function builds the trainer and accepts callbacks, but no configuration.

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


class DistillationCallback(FederatedCallback):
    """
    Installs a distillation algorithm. It replaces `distillation` of [`FederatedConfig`].

    Use it if a function builds the trainer and accepts callbacks, but no configuration.

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
