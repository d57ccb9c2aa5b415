"""`Cohort`: the clients of a round, as a distillation algorithm sees them. It asks, and they answer, through messages.

A client that fails, or whose predictions are not finite or of another shape, is left out of the rest of the round, by
name. The round goes on as long as `min_clients` are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from ..clients.positions import Positions
from ..messages import (
    CLASS_COUNT,
    ClientFailure,
    Distill,
    Evaluate,
    Feedback,
    Message,
    Metrics,
    Predict,
    Predictions,
    public_order,
)
from ..messages.validation import RoundFailedError
from ..utils.random import derived_seed
from ..utils.weighted_mean import WeightedMean
from .client_weights import ClientReport, summarize_logits
from .packed import PackedRows, packed
from .teachers import Teachers


logger = logging.get_logger(__name__)

# `ask(phase, client_ids, message_for)`: sends each client its message and returns the replies, in the clients' order.
Ask = Callable[[str, Sequence[str], Callable[[str], Message]], dict[str, Message]]
R = TypeVar("R")
# `run_on_main(label, find)`: what `find` returns in the main process, in all processes.
RunOnMain = Callable[[str, Callable[[], Any]], Any]
# What F1 is called: by a user's own metrics, by those of tasks. The first that there is stands for a client.
F1_NAMES = ("eval_f1", "eval_f1_weighted", "eval_f1_macro", "eval_span_f1")
Decode = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class PublicRows:
    """
    A part of the public rows, as messages name it.

    Args:
        start (`int`): First row.
        stop (`int`): The row after the last.
        order (`int`, *optional*): Seed of the order that both count in; `None` for the rows as they are.

    Example:

    ```python
    >>> from hf_federated.distillation import PublicRows

    >>> len(PublicRows(0, 32))
    32
    ```
    """

    start: int
    stop: int
    order: int | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass
class Cohort:
    """
    The clients of a round.

    Args:
        round (`int`): Round number, from 0.
        metrics (`dict[str, dict[str, float]]`): What each client reported of its local training, in the cohort's
            order. A client that is left out is taken away.
        ask (`Callable`): Sends messages and returns replies.
        decode (`Callable`): The algorithm's codec, to a tensor of shape `(rows, classes)`.
        seed (`int`): Of the run; clients' seeds follow from it.
        min_clients (`int`): Below which the round fails.
        rejected (`dict[str, str]`): Where clients that are left out are named, with the reason.
        extra ([`~hf_federated.aggregation.WeightedMean`], *optional*): Where parameters are averaged, the mean of what
            clients sent beside them.
        teachers ([`Teachers`], *optional*): The clients' models, of a method that needs them.
        positions ([`~hf_federated.clients.positions.Positions`], *optional*): Where in public rows the server's model
            predicts, if that is not once a row. "Rows" of predictions below are then positions: those that all clients
            of the cohort, and the server's model, have a place for.
        run_on_main (`Callable`, *optional*): `run_on_main(label, find)` calls `find` on the main process and returns
            its result on all processes, which run the same rounds. By default there is one process.

    Example: [`Distillation`].
    """

    round: int
    metrics: dict[str, dict[str, float]]
    ask: Ask
    decode: Decode
    seed: int
    min_clients: int = 1
    rejected: dict[str, str] = field(default_factory=dict)
    extra: WeightedMean | None = None
    teachers: Teachers | None = None
    positions: Positions | None = None
    run_on_main: RunOnMain = field(default_factory=lambda: lambda label, find: find())

    @property
    def client_ids(self) -> list[str]:
        """Who takes part, in order."""
        return list(self.metrics)

    def seed_of(self, client_id: str, *purpose: str | int) -> int:
        """A seed for a client, for this round and purpose alone."""
        return derived_seed(self.seed, client_id, self.round, *purpose)

    def check_reports(self, check: Callable[[Mapping[str, float]], None]) -> None:
        """
        Leave out the clients whose reports of their local training are of no use.

        Args:
            check (`Callable`): Raises `ValueError` for such metrics of a client.

        Raises:
            RoundFailedError: If fewer than `min_clients` are left.
        """
        for client_id, metrics in list(self.metrics.items()):
            try:
                check(metrics)
            except ValueError as error:
                self.leave_out(client_id, f"Client {client_id!r}, round {self.round}: {error}")
        self.check_enough()

    def predict(self, rows: PublicRows, shape: tuple[int, ...], keeps_graph: bool = False) -> dict[str, torch.Tensor]:
        """
        The clients' predictions of public rows.

        Args:
            rows ([`PublicRows`]): Which.
            shape (`tuple[int, ...]`): What a client's predictions must look like, of all positions of these rows.
            keeps_graph (`bool`, *optional*, defaults to `False`): Whether [`~Cohort.feed_back`] on them follows.

        Returns:
            `dict[str, torch.Tensor]`: Logits by client, of that shape, less the positions that a client or the server
            has no place for.

        Raises:
            RoundFailedError: If fewer than `min_clients` gave valid ones.
        """

        found, places = self._ask_for_predictions(rows, shape, keeps_graph, self._unpack)
        return found if self.positions is None else {name: found[name][places[name]] for name in found}

    def predict_packed(self, rows: PublicRows, shape: tuple[int, ...]) -> dict[str, PackedRows]:
        """
        The same as [`~Cohort.predict`], as small as it travelled. The arguments are those of it, and what it raises.

        Returns:
            `dict[str, PackedRows]`: Logits by client, unpacked where they are asked for.
        """
        found, places = self._ask_for_predictions(rows, shape, False, self._check_packed)
        return found if self.positions is None else {name: found[name].only(places[name]) for name in found}

    def _ask_for_predictions(
        self, rows: PublicRows, shape: tuple[int, ...], keeps_graph: bool, read: Callable[..., R]
    ) -> tuple[dict[str, R], dict[str, torch.Tensor]]:
        """Each client's predictions, and which of them are of positions that all have a place for."""

        def message(client_id: str) -> Message:
            return Predict(**self._about(rows, client_id), keeps_graph=keeps_graph)

        found: dict[str, R] = {}
        absent: dict[str, torch.Tensor] = {}
        for client_id, reply in self._send("prediction", message, Predictions).items():
            assert isinstance(reply, Predictions)
            try:
                values, missing = reply.values, torch.empty(0, dtype=torch.int64)
                if self.positions is not None:
                    values, missing = self.positions.take_absent(self._row_numbers(rows), values)
                num_there = shape[0] - len(missing)
                predictions = read(values, (num_there, *shape[1:]))
                if not keeps_graph and not num_there:
                    raise ValueError(
                        f"its tokenizer keeps nothing of any of the {shape[0]} words of the public rows, and with it "
                        "nobody could learn one. Raise `max_length` of its tokenizer, or give it another."
                    )
                found[client_id], absent[client_id] = predictions, missing
            except ValueError as error:
                self.leave_out(client_id, f"Client {client_id!r}, round {self.round}: {error}")
        self.check_enough()
        return found, {} if self.positions is None else self._narrow(rows, absent)

    def _narrow(self, rows: PublicRows, absent: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The exchange is about what all clients and the server's model have a place for; where each client has it."""
        assert self.positions is not None
        numbers = self._row_numbers(rows)
        self.positions.agree(numbers)
        of_any = torch.cat([self.positions.absent_of(numbers).long(), *absent.values()]).unique()
        self.positions.agree(numbers, of_any)
        is_kept = torch.ones(len(self.positions.numbers_of(numbers)), dtype=torch.bool)
        is_kept[of_any] = False
        places = {}
        for client_id, missing in absent.items():
            is_there = torch.ones_like(is_kept)
            is_there[missing] = False
            places[client_id] = is_kept[is_there].nonzero().flatten()
        return places

    def _row_numbers(self, rows: PublicRows) -> torch.Tensor:
        assert self.positions is not None
        return public_order(self.positions.num_rows, rows.order)[rows.start : rows.stop]

    def _with_absent(self, rows: PublicRows, targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Targets, with the positions that they leave out if there are any."""
        if self.positions is None:
            return dict(targets)
        return self.positions.add_absent(self._row_numbers(rows), targets)

    def distill(
        self,
        rows: PublicRows,
        targets: Mapping[str, torch.Tensor],
        num_epochs: int,
        num_training_epochs: int,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """
        Let the clients learn these targets of public rows.

        Args:
            rows ([`PublicRows`]): Which.
            targets (`Mapping[str, torch.Tensor]`): The same for all clients, as the algorithm's codec writes them.
            num_epochs (`int`): Passes over the rows.
            num_training_epochs (`int`): Passes of a client over these rows over the run.
            settings (`Mapping[str, Any]`, *optional*): The algorithm's numbers, JSON scalars only.

        Returns:
            `dict[str, float]`: Each client's loss.
        """

        def message(client_id: str) -> Message:
            return Distill(
                **self._about(rows, client_id, "distillation"),
                targets=self._with_absent(rows, targets),
                num_epochs=num_epochs,
                num_training_epochs=num_training_epochs,
                settings=dict(settings or {}),
            )

        return self._losses("distillation", message)

    def feed_back(
        self,
        rows: PublicRows,
        targets: Mapping[str, torch.Tensor],
        feedback: Mapping[str, Mapping[str, torch.Tensor]],
        settings: Mapping[str, Mapping[str, Any]],
        step: int,
        num_training_steps: int,
    ) -> dict[str, float]:
        """
        Answer the predictions of a mini-batch; each client takes one step.

        Args:
            rows ([`PublicRows`]): As in the call of [`~Cohort.predict`] that it answers.
            targets (`Mapping[str, torch.Tensor]`): The same for all clients, as the algorithm's codec writes them.
            feedback (`Mapping[str, Mapping[str, torch.Tensor]]`): By client.
            settings (`Mapping[str, Mapping[str, Any]]`): By client, JSON scalars only.
            step (`int`): Such steps of the run before this one.
            num_training_steps (`int`): Such steps of the run.

        Returns:
            `dict[str, float]`: Each client's loss.
        """

        def message(client_id: str) -> Message:
            return Feedback(
                **self._about(rows, client_id),
                targets=self._with_absent(rows, targets),
                feedback=dict(feedback[client_id]),
                step=step,
                num_training_steps=num_training_steps,
                settings=dict(settings[client_id]),
            )

        return self._losses("feedback", message)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """The metrics of the clients' own models on their own evaluation rows, by client."""
        replies = self._send("evaluation", lambda client_id: Evaluate(self.round, client_id, {}), Metrics)
        self.check_enough()
        return {client_id: reply.metrics for client_id, reply in replies.items() if isinstance(reply, Metrics)}

    def _about(self, rows: PublicRows, client_id: str, *purpose: str) -> dict[str, Any]:
        """What every message about public rows says. A prediction and the feedback on it share their seed."""
        seed = self.seed_of(client_id, *(purpose or ("public", rows.order or 0, rows.start)))
        return {
            "round": self.round,
            "client_id": client_id,
            "order": rows.order,
            "start": rows.start,
            "stop": rows.stop,
            "seed": seed,
        }

    def _losses(self, phase: str, message: Callable[[str], Message]) -> dict[str, float]:
        losses: dict[str, float] = {}
        for client_id, reply in self._send(phase, message, Metrics).items():
            assert isinstance(reply, Metrics)
            losses[client_id] = reply.metrics["distillation_loss"]
        self.check_enough()
        return losses

    def _send(self, phase: str, message: Callable[[str], Message], expected: type[Message]) -> dict[str, Message]:
        """The replies of a kind; whoever gave another one is left out."""
        asked = self.client_ids
        replies = self.ask(phase, asked, message)
        accepted: dict[str, Message] = {}
        for client_id in asked:
            reply = replies.get(client_id)
            if isinstance(reply, expected) and reply.round == self.round:
                accepted[client_id] = reply
                continue
            reason = "no answer" if reply is None else f"answered with a {type(reply).__name__}"
            if isinstance(reply, ClientFailure):
                reason = reply.error
            self.leave_out(client_id, f"Client {client_id!r}, round {self.round}, {phase}: {reason}")
        return accepted

    def _unpack(self, encoded: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        values = self.decode(encoded)
        _check(values, values.shape, shape)
        return values

    def _check_packed(self, encoded: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> PackedRows:
        rows = packed(encoded, self.decode)
        for start, places in rows.places():
            try:
                block = rows[places]
                _check(block, (len(rows), *block.shape[1:]), shape)
            except ValueError as error:
                raise ValueError(
                    f"{error} (Rows are counted from row {start} here.)" if start else str(error)
                ) from error
        return rows

    def leave_out(self, client_id: str, reason: str) -> None:
        """Go on without a client in this round, and without its model until it sends another."""
        logger.warning(f"Left out: {reason}")
        self.rejected[client_id] = reason
        self.metrics.pop(client_id, None)
        if self.teachers is not None:
            self.teachers.remove(client_id)

    def check_enough(self) -> None:
        """
        Raises:
            RoundFailedError: If fewer than `min_clients` are left.
        """
        if len(self.metrics) < self.min_clients:
            reason = next(reversed(self.rejected.values()), "")
            raise RoundFailedError(
                f"Round {self.round}: {len(self.metrics)} clients are left for distillation, and "
                f"min_clients={self.min_clients}. The last failure: {reason}"
            )

    def check_agreed(self, num_positions: int) -> None:
        """
        Args:
            num_positions (`int`): That all clients of the cohort and the server's model predicted.

        Raises:
            RoundFailedError: If there are none.
        """
        if not num_positions:
            raise RoundFailedError(
                f"Round {self.round}: there is no word of the public rows of which the tokenizers of the server and "
                f"of all {len(self.metrics)} clients keep something. Raise `max_length` of the task, or take other "
                "rows."
            )


def _check(values: torch.Tensor, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if given != shape:
        raise ValueError(
            f"its predictions have the shape {tuple(given)}, expected {shape}: the rows asked for, and the "
            "classes of the server's model. All clients must tell the same classes apart, in the same order."
        )
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"its prediction of row {row} of those asked for holds NaN or infinite values. Lower this client's "
            "learning rate, or look at its data."
        )


def _f1(metrics: Mapping[str, float]) -> float | None:
    return next((metrics[name] for name in F1_NAMES if name in metrics), None)


def reports(
    cohort: Cohort,
    predictions: Mapping[str, torch.Tensor] | None = None,
    evaluations: Mapping[str, Mapping[str, float]] | None = None,
) -> list[ClientReport]:
    """
    What the clients told of their local training, in the cohort's order.

    Args:
        cohort ([`Cohort`]): The clients.
        predictions (`Mapping[str, torch.Tensor]`, *optional*): Their logits, to be summed up too.
        evaluations (`Mapping[str, Mapping[str, float]]`, *optional*): Their metrics, of which the first of `eval_f1`,
            `eval_f1_weighted`, `eval_f1_macro` and `eval_span_f1` is taken.
    """
    found = []
    for client_id, row in cohort.metrics.items():
        counts = {name: int(value) for name, value in row.items() if name.startswith(CLASS_COUNT)}
        found.append(
            ClientReport(
                client_id,
                num_examples=int(row["num_examples"]),
                min_epoch_loss=row.get("min_epoch_loss", math.nan),
                f1=None if evaluations is None else _f1(evaluations[client_id]),
                class_counts=tuple(counts[f"{CLASS_COUNT}{label}"] for label in range(len(counts))) or None,
                **({} if predictions is None else summarize_logits(predictions[client_id])),
            )
        )
    return found
