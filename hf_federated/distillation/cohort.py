"""`Cohort`: the clients of a round. It sends messages to the clients and collects their replies.

A client is excluded from the rest of the round if it fails, or if its predictions are not finite or have the wrong
shape. The log names the client. The round continues as long as `min_clients` clients are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from ..clients.positions import Positions
from ..messages import (
    ClientFailure,
    Distill,
    Evaluate,
    Feedback,
    Message,
    Metrics,
    Predict,
    Predictions,
)
from ..messages.validation import INVALID_CONTENT
from ..utils.errors import RoundFailedError
from ..utils.random import derived_seed
from ..utils.weighted_mean import Tensors, WeightedMean
from .alignment import Alignment, EncodedTargets
from .lazy_rows import LazyRows, decode_lazily
from .public_rows import PublicRows
from .teachers import Teachers


logger = logging.get_logger(__name__)

# Largest magnitude of a logit that a client may send. The largest number of float16 is 65504.
MAX_LOGIT = 1e6
# Largest distillation loss that a client may report: a squared error of logits.
MAX_LOSS = MAX_LOGIT**2

# `ask(phase, client_ids, message_for)` sends each client its message and returns the replies, in the clients' order.
Ask = Callable[[str, Sequence[str], Callable[[str], Message]], dict[str, Message]]
R = TypeVar("R")
Reply = TypeVar("Reply", bound=Message)
# `run_on_main(label, find)` calls `find` on the main process and returns its result on all processes.
RunOnMain = Callable[[str, Callable[[], Any]], Any]
# `decode(values, num_classes)` decodes predictions.
Decode = Callable[[Tensors, int], torch.Tensor]


@dataclass
class Cohort:
    """
    The clients of a round.

    Args:
        round (`int`): Round number, from 0.
        metrics (`dict[str, dict[str, float]]`): Metrics of each client's local training, in the order of the cohort.
            An excluded client is removed.
        ask (`Callable`): Sends messages and returns the replies.
        decode (`Callable`): Decodes predictions to a tensor of shape `(rows, classes)` with the algorithm's codec.
        seed (`int`): Seed of the run. The clients' seeds are derived from it.
        min_clients (`int`, *optional*, defaults to `1`): Minimum number of clients. The round fails with fewer
            clients.
        rejected (`dict[str, str]`, *optional*): Reasons of the excluded clients, by client. Updated in place.
        extra ([`~hf_federated.aggregation.WeightedMean`], *optional*): If parameters are averaged, the mean of the
            tensors that clients sent in addition to their parameters.
        teachers ([`Teachers`], *optional*): The clients' models, for a method that needs them.
        positions ([`~hf_federated.clients.positions.Positions`], *optional*): Positions of the words or tokens that
            the server's model predicts. A row of predictions is then one position. Only positions that the tokenizers
            of the server and of all clients of the cohort keep are exchanged.
        alignment ([`Alignment`], *optional*): How the predictions of a client correspond to those of the server.
        run_on_main (`Callable`, *optional*): `run_on_main(label, find)` calls `find` on the main process and returns
            its result on all processes. All processes run the same rounds. By default, there is one process.
    """

    round: int
    metrics: dict[str, dict[str, float]]
    ask: Ask
    decode: Decode
    seed: int
    min_clients: int = 1
    rejected: dict[str, str] = field(default_factory=dict)
    extra: WeightedMean = field(default_factory=WeightedMean)
    teachers: Teachers | None = None
    positions: Positions | None = None
    alignment: Alignment = field(default_factory=Alignment)
    run_on_main: RunOnMain = field(default_factory=lambda: lambda label, find: find())

    @property
    def client_ids(self) -> list[str]:
        """The ids of the clients, in order."""
        return list(self.metrics)

    def seed_of(self, client_id: str, *purpose: str | int) -> int:
        """A seed for a client. It is unique to the client, the round and the purpose."""
        return derived_seed(self.seed, client_id, self.round, *purpose)

    def check_reports(self, check: Callable[[Mapping[str, float]], None]) -> None:
        """
        Exclude the clients whose metrics of local training are invalid.

        Args:
            check (`Callable`): Raises `ValueError` for invalid metrics.

        Raises:
            RoundFailedError: If fewer than `min_clients` clients are left.
        """
        for client_id, metrics in list(self.metrics.items()):
            try:
                check(metrics)
            except INVALID_CONTENT as error:
                self.exclude(client_id, f"Client {client_id!r}, round {self.round + 1}: {error}")
        self.check_enough()

    def predict(self, rows: PublicRows, shape: tuple[int, ...], keeps_graph: bool = False) -> dict[str, torch.Tensor]:
        """
        Ask the clients for predictions of public examples.

        Args:
            rows ([`PublicRows`]): The public examples.
            shape (`tuple[int, ...]`): Expected shape of a client's predictions, counting all positions of the
                examples.
            keeps_graph (`bool`, *optional*, defaults to `False`): Whether [`~Cohort.send_feedback`] follows for these
                predictions.

        Returns:
            `dict[str, torch.Tensor]`: Logits by client, of this shape without the positions that a client or the
            server drops.

        Raises:
            RoundFailedError: If fewer than `min_clients` clients sent valid predictions.
        """
        predictions, indices = self._ask_for_predictions(rows, shape, keeps_graph, self._unpack)
        if self.positions is None:
            return predictions
        return {client_id: predictions[client_id][indices[client_id]] for client_id in predictions}

    def predict_lazily(self, rows: PublicRows, shape: tuple[int, ...]) -> dict[str, LazyRows]:
        """
        Ask the clients for predictions, and decode them when they are needed.

        Args:
            rows ([`PublicRows`]): The public examples.
            shape (`tuple[int, ...]`): As in [`~Cohort.predict`].

        Returns:
            `dict[str, LazyRows]`: Logits by client.

        Raises:
            RoundFailedError: As in [`~Cohort.predict`].
        """
        predictions, indices = self._ask_for_predictions(rows, shape, False, self._check_lazy)
        if self.positions is None:
            return predictions
        return {client_id: predictions[client_id].select(indices[client_id]) for client_id in predictions}

    def _ask_for_predictions(
        self, rows: PublicRows, shape: tuple[int, ...], keeps_graph: bool, read: Callable[..., R]
    ) -> tuple[dict[str, R], dict[str, torch.Tensor]]:
        """Ask for predictions. Return them by client, and the indices of the exchanged positions in them."""

        def message(client_id: str) -> Message:
            return Predict(**self._about(rows, client_id), keeps_graph=keeps_graph)

        found: dict[str, R] = {}
        absent: dict[str, torch.Tensor] = {}
        for client_id, reply in self._send("prediction", message, Predictions).items():
            try:
                values, missing = reply.values, torch.empty(0, dtype=torch.int64)
                if self.positions is not None:
                    values, missing = self.positions.take_absent(rows.indices(self.positions.num_rows), values)
                num_present = shape[0] - len(missing)
                predictions = read(client_id, values, (num_present, *shape[1:]))
                if not keeps_graph and not num_present:
                    raise ValueError(
                        f"its tokenizer keeps none of the {shape[0]} words of the public examples, so no client could "
                        "learn from them. Raise `max_length` of its tokenizer, or use another tokenizer."
                    )
                found[client_id], absent[client_id] = predictions, missing
            except INVALID_CONTENT as error:
                text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                self.exclude(client_id, f"Client {client_id!r}, round {self.round + 1}: {text}")
        self.check_enough()
        return found, {} if self.positions is None else _narrow(self.positions, rows, absent)

    def _with_absent(self, rows: PublicRows, targets: EncodedTargets, client_id: str) -> dict[str, torch.Tensor]:
        """Return a client's encoded targets, with the numbers of the positions without targets, if there are any."""
        targets = targets(client_id) if callable(targets) else targets
        if self.positions is None:
            return dict(targets)
        return self.positions.add_absent(rows.indices(self.positions.num_rows), targets)

    def distill(
        self,
        rows: PublicRows,
        targets: EncodedTargets,
        num_epochs: int,
        num_training_epochs: int,
        settings: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        """
        Train the clients on targets of public examples.

        Args:
            rows ([`PublicRows`]): The public examples.
            targets (`Mapping[str, torch.Tensor]` or `Callable`): Encoded targets, the same for all clients or a
                function of the client id.
            num_epochs (`int`): Number of passes over the examples.
            num_training_epochs (`int`): Number of passes of a client over these examples in the whole run.
            settings (`Mapping[str, Any]`, *optional*): Settings of the algorithm, JSON scalars only.

        Returns:
            `dict[str, float]`: Loss of each client.

        Raises:
            RoundFailedError: If fewer than `min_clients` clients are left.
        """

        def message(client_id: str) -> Message:
            return Distill(
                **self._about(rows, client_id, "distillation"),
                targets=self._with_absent(rows, targets, client_id),
                num_epochs=num_epochs,
                num_training_epochs=num_training_epochs,
                settings=dict(settings or {}),
            )

        return self._losses("distillation", message)

    def send_feedback(
        self,
        rows: PublicRows,
        targets: EncodedTargets,
        feedback: Mapping[str, Tensors],
        settings: Mapping[str, Mapping[str, Any]],
        step: int,
        num_training_steps: int,
    ) -> dict[str, float]:
        """
        Answer the predictions of a mini-batch. Each client takes one step.

        Args:
            rows ([`PublicRows`]): The examples of the preceding call of [`~Cohort.predict`].
            targets (`Mapping[str, torch.Tensor]` or `Callable`): Encoded targets, the same for all clients or a
                function of the client id.
            feedback (`Mapping[str, Mapping[str, torch.Tensor]]`): Encoded feedback, by client.
            settings (`Mapping[str, Mapping[str, Any]]`): Settings by client, JSON scalars only.
            step (`int`): Number of feedback steps of the run before this step.
            num_training_steps (`int`): Number of feedback steps of the run.

        Returns:
            `dict[str, float]`: Loss of each client.

        Raises:
            RoundFailedError: If fewer than `min_clients` clients are left.
        """

        def message(client_id: str) -> Message:
            return Feedback(
                **self._about(rows, client_id),
                targets=self._with_absent(rows, targets, client_id),
                feedback=dict(feedback[client_id]),
                step=step,
                num_training_steps=num_training_steps,
                settings=dict(settings[client_id]),
            )

        return self._losses("feedback", message)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """
        Evaluate the clients' models on the clients' evaluation examples.

        Returns:
            `dict[str, dict[str, float]]`: Metrics by client.

        Raises:
            RoundFailedError: If fewer than `min_clients` clients are left.
        """
        replies = self._send("evaluation", lambda client_id: Evaluate(self.round, client_id, {}), Metrics)
        self.check_enough()
        return {client_id: reply.metrics for client_id, reply in replies.items()}

    def _about(self, rows: PublicRows, client_id: str, *purpose: str) -> dict[str, Any]:
        """
        Fields that all messages about public examples share.

        A prediction and the feedback on it have the same seed.
        """
        seed = self.seed_of(client_id, *(purpose or ("public", rows.order or 0, rows.start)))
        return {"round": self.round, "client_id": client_id, "seed": seed, **vars(rows)}

    def _losses(self, phase: str, message: Callable[[str], Message]) -> dict[str, float]:
        losses: dict[str, float] = {}
        for client_id, reply in self._send(phase, message, Metrics).items():
            loss = reply.metrics.get("distillation_loss")
            if loss is not None and abs(loss) <= MAX_LOSS:  # Not NaN.
                losses[client_id] = float(loss)
                continue
            problem = (
                "the reply has no number `distillation_loss`. The client side of the distillation must add it to the "
                "metrics."
                if loss is None
                else f"`distillation_loss` is {loss:g}, expected a finite number."
            )
            self.exclude(client_id, f"Client {client_id!r}, round {self.round + 1}, {phase}: {problem}")
        self.check_enough()
        return losses

    def _send(self, phase: str, message: Callable[[str], Message], expected: type[Reply]) -> dict[str, Reply]:
        """Send messages and return the replies of the expected type. Exclude clients without such a reply."""
        asked = self.client_ids
        replies = self.ask(phase, asked, message)
        accepted: dict[str, Reply] = {}
        for client_id in asked:
            reply = replies.get(client_id)
            if isinstance(reply, expected) and reply.round == self.round:
                accepted[client_id] = reply
                continue
            reason = "no answer" if reply is None else f"answered with a {type(reply).__name__}"
            if isinstance(reply, ClientFailure):
                reason = reply.error
            self.exclude(client_id, f"Client {client_id!r}, round {self.round + 1}, {phase}: {reason}")
            # The clients behind a failure that leaves too few clients were not asked.
            self.check_enough()
        return accepted

    def _unpack(self, client_id: str, encoded: Tensors, shape: tuple[int, ...]) -> torch.Tensor:
        sent = self.alignment.client_shape(client_id, shape)
        logits = self.decode(encoded, sent[-1])
        _check(logits, logits.shape, sent)
        aligned = self.alignment.to_server(client_id, logits)
        if aligned is not logits:
            _check(aligned, aligned.shape, shape)
        return aligned

    def _check_lazy(self, client_id: str, encoded: Tensors, shape: tuple[int, ...]) -> LazyRows:
        rows = decode_lazily(encoded, lambda values: self.decode(values, shape[-1]))
        for start, indices in rows.index_blocks():
            try:
                block = rows[indices]
                _check(block, (len(rows), *block.shape[1:]), shape)
            except ValueError as error:
                raise ValueError(
                    f"{error} (Row numbers in this message start at row {start}.)" if start else str(error)
                ) from error
        return rows

    def exclude(self, client_id: str, reason: str) -> None:
        """Exclude a client from the rest of the round, and remove its model until it sends another update."""
        logger.warning(f"Excluded from the round: {reason}")
        self.rejected[client_id] = reason
        self.metrics.pop(client_id, None)
        if self.teachers is not None:
            self.teachers.remove(client_id)

    def check_enough(self) -> None:
        """
        Check that enough clients are left.

        Raises:
            RoundFailedError: If fewer than `min_clients` clients are left.
        """
        if len(self.metrics) < self.min_clients:
            reason = next(reversed(self.rejected.values()), "")
            raise RoundFailedError(
                f"Round {self.round + 1}: {len(self.metrics)} clients are left for distillation, and "
                f"min_clients={self.min_clients}. The last failure: {reason}"
            )

    def check_num_positions(self, num_positions: int) -> None:
        """
        Check that the server and all clients have at least one predicted position in common.

        Args:
            num_positions (`int`): Number of positions that the server's model and all clients of the cohort predicted.

        Raises:
            RoundFailedError: If the number is 0.
        """
        if not num_positions:
            raise RoundFailedError(
                f"Round {self.round + 1}: the tokenizers of the server and of all {len(self.metrics)} clients keep no "
                "word of the public examples in common. Raise `max_length` of the task, or use other public examples."
            )


def _check(values: torch.Tensor, given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if given != shape:
        raise ValueError(
            f"its predictions have the shape {tuple(given)}; expected {shape}, the number of requested rows and the "
            "number of classes of the server's model. Give all clients the same classes in the same order."
        )
    if values.is_meta:  # A dry round has no values.
        return
    if not bool(values.isfinite().all()):
        row = int((~values.isfinite()).flatten(1).any(1).nonzero()[0])
        raise ValueError(
            f"its prediction of requested row {row} contains NaN or infinite values. Lower this client's learning "
            "rate, or check its data."
        )
    largest = float(values.abs().max()) if values.numel() else 0.0
    if largest > MAX_LOGIT:
        raise ValueError(f"its predictions have a logit of magnitude {largest:g}; at most {MAX_LOGIT:g} is allowed.")


def _narrow(positions: Positions, rows: PublicRows, absent: Tensors) -> dict[str, torch.Tensor]:
    """
    Restrict the exchange to the positions that the server and all clients keep.

    Args:
        positions ([`~hf_federated.clients.positions.Positions`]): Positions that the server's model predicts.
        rows ([`PublicRows`]): The public examples.
        absent (`Mapping[str, torch.Tensor]`): Numbers of the positions that each client drops.

    Returns:
        `dict[str, torch.Tensor]`: Indices of the exchanged positions in the predictions of each client.
    """
    numbers = rows.indices(positions.num_rows)
    positions.agree(numbers)
    dropped = torch.cat([positions.absent_of(numbers).long(), *absent.values()]).unique()
    positions.agree(numbers, dropped)
    is_kept = torch.ones(len(positions.numbers_of(numbers)), dtype=torch.bool)
    is_kept[dropped] = False
    indices = {}
    for client_id, missing in absent.items():
        is_present = torch.ones_like(is_kept)
        is_present[missing] = False
        indices[client_id] = is_kept[is_present].nonzero().flatten()
    return indices
