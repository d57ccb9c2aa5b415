"""The client side of a distillation algorithm: its part in local training, and its answers to messages.

The client side runs in the client's process. It knows only the settings of the algorithm, the received messages, and
the state that the client keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from ..clients.context import ClientContext
from ..clients.models import OwnModel
from ..clients.positions import Positions
from ..clients.student import Student, Targets
from ..messages import Distill, Feedback, Message, Metrics, Predict, Predictions, PublicRowsMessage
from ..utils.random import isolated_rng
from .public_rows import PublicRows


if TYPE_CHECKING:
    from .base import Distillation


class LocalDistillation:
    """
    The algorithm's part in one local training. [`DistillationClient.local_training`] builds one for each `Fit`.

    Attributes:
        callbacks (`Sequence[TrainerCallback]`): Callbacks that run inside this training.
        frozen (`Sequence[torch.nn.Parameter]`): Exchanged parameters that this training does not change.
    """

    callbacks: Sequence[TrainerCallback] = ()
    frozen: Sequence[nn.Parameter] = ()

    def on_batch(self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        """
        Called before the loss of a micro-batch is computed.

        Args:
            trainer (`transformers.Trainer`): The client's trainer.
            model (`torch.nn.Module`): The model of the training step.
            inputs (`Mapping[str, Any]`): The micro-batch.
            num_items (`torch.Tensor` or `int`, *optional*): Number of items in all micro-batches of the step.
        """

    def finish(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, torch.Tensor]:
        """
        Called after local training.

        Args:
            trainer (`transformers.Trainer`): The client's trainer.
            metrics (`dict[str, float]`): The metrics of the update, which may be changed in place.

        Returns:
            `dict[str, torch.Tensor]`: Tensors for the `extra` of the update, with the names, shapes and dtypes of
            [`Distillation.expected_extra`]. The server receives their mean over clients.
        """
        return {}


class DistillationClient:
    """
    The client side of a distillation algorithm. `client_class` of a [`Distillation`] names its class.

    Args:
        algorithm ([`Distillation`]): The algorithm. Only its settings and formulas are used.

    Attributes:
        messages (`tuple[type[Message], ...]`): Types of the messages that [`~DistillationClient.handle`] answers.
    """

    messages: ClassVar[tuple[type[Message], ...]] = (Predict, Distill, Feedback)

    def __init__(self, algorithm: Distillation) -> None:
        self.algorithm: Any = algorithm

    def before_training(self, context: ClientContext) -> None:
        """
        Called for each `Fit`, before the global state is written into the client's model.

        Args:
            context ([`ClientContext`]): The client. Changes to `context.state` are kept for later rounds.
        """

    def local_training(self, context: ClientContext, round: int) -> LocalDistillation:
        """
        The algorithm's part in a local training.

        Args:
            context ([`ClientContext`]): The client.
            round (`int`): Round number, from 0.
        """
        return LocalDistillation()

    def handle(self, message: Message, context: ClientContext) -> Message:
        """
        Answer a message of one of the types in `messages`.

        Args:
            message ([`Message`]): The server's message.
            context ([`ClientContext`]): The client.

        Raises:
            TypeError: If the client has no own model or no public examples.
        """
        if not isinstance(context.model, OwnModel) or context.model.student is None:
            raise TypeError(
                f"The client cannot answer a {type(message).__name__}, because it has no own model or no public "
                "examples. Pass `public_dataset` to the trainer of the client."
            )
        if isinstance(message, Predict):
            return self.predict(message, context.model, context.student)
        if isinstance(message, Distill):
            return self.distill(message, context.model, context.student)
        if isinstance(message, Feedback):
            return self.take_feedback(message, context.model, context.student)
        raise TypeError(f"{type(self).__name__} does not answer the message {type(message).__name__}.")

    def predict(self, message: Predict, model: OwnModel, student: Student) -> Predictions:
        """Predict the public examples of the message."""
        rows = rows_of(message, student)
        if student.positions is not None:
            student.positions.agree(rows)
        if message.keeps_graph:
            logits = _training_forward(message, student)
            model.pending = (_place(message), logits)
            values = self.algorithm.encode(logits.detach().cpu())
        elif student.positions is None:
            values = self.algorithm.encode(student.predict(rows))
        else:
            values = self.algorithm.concatenate_encoded(student.predict_batches(rows, self.algorithm.encode))
        if student.positions is not None:
            values = student.positions.add_absent(rows, values)
        return Predictions(message.round, message.client_id, values)

    def distill(self, message: Distill, model: OwnModel, student: Student) -> Metrics:
        """Train the client's model on the targets of the message."""
        rows = rows_of(message, student)
        steps_per_epoch = -(-len(rows) // student.batch_size)
        student.prepare(
            message.num_training_epochs * steps_per_epoch, message.round * message.num_epochs * steps_per_epoch
        )
        if student.positions is None:
            targets = self.algorithm.decode_targets(message.targets, student.num_classes)
        else:
            targets = self.algorithm.unpack_targets(_targets(message, student), student.num_classes)
            _check_count(targets, student.positions, rows)
        with model.restore_on_failure():
            loss = student.fit(
                rows,
                targets,
                lambda logits, batch: self.algorithm.client_loss(logits, batch, message.settings),
                message.num_epochs,
                message.seed,
            )
        return Metrics(message.round, message.client_id, num_examples=len(rows), metrics={"distillation_loss": loss})

    def take_feedback(self, message: Feedback, model: OwnModel, student: Student) -> Metrics:
        """
        Take one step on the mini-batch that the client predicted last.

        The step uses the forward pass of the prediction. If the model was moved to the client store since then, the
        forward pass is repeated with the same dropout, which gives the same gradients bit for bit.
        """
        student.prepare(message.num_training_steps, message.step)
        pending, model.pending = model.pending, None
        if student.positions is not None:
            # As in the prediction, use all positions that the client's tokenizer keeps.
            student.positions.agree(rows_of(message, student))
        if pending is not None and pending[0] == _place(message):
            logits = pending[1]
        else:
            logits = _training_forward(message, student)
        if student.positions is not None:
            rows = rows_of(message, student)
            message = dataclasses.replace(message, targets=_targets(message, student))
            logits = logits[student.positions.agreed_among_seen(rows).to(logits.device)]
        loss = float(student.step(self.algorithm.feedback_loss(logits, message)))
        num_rows = message.stop - message.start
        return Metrics(message.round, message.client_id, num_examples=num_rows, metrics={"distillation_loss": loss})


def rows_of(message: PublicRowsMessage, student: Student) -> torch.Tensor:
    """
    The public examples of a message.

    Returns:
        `torch.Tensor`: Numbers of the examples, of shape `(stop - start,)`.

    Raises:
        ValueError: If the message names examples that do not exist.
    """
    if not 0 <= message.start < message.stop <= student.num_rows:
        raise ValueError(
            f"The message names the public examples {message.start} to {message.stop}, but this client has "
            f"{student.num_rows} public examples. Give the server and the clients the same `public_dataset`."
        )
    return PublicRows(message.start, message.stop, message.order).indices(student.num_rows)


def _place(message: PublicRowsMessage) -> tuple[Any, ...]:
    return message.round, message.order, message.start, message.stop, message.seed


def _training_forward(message: PublicRowsMessage, student: Student) -> torch.Tensor:
    student.model.train()
    rows = student.with_positions(rows_of(message, student))
    if not len(rows):
        return torch.zeros(0, student.num_classes, device=student.device)
    with isolated_rng(message.seed):
        return student.forward(student.inputs(rows))


def _targets(message: Distill | Feedback, student: Student) -> dict[str, torch.Tensor]:
    """The encoded targets of a message. Positions that the targets leave out are excluded from the exchange."""
    if student.positions is None:
        return message.targets
    rows = rows_of(message, student)
    targets, absent = student.positions.take_absent(rows, message.targets)
    student.positions.agree(rows, absent)
    return targets


def _check_count(targets: Targets, positions: Positions, rows: torch.Tensor) -> None:
    if len(targets) != (expected := len(positions.agreed_of(rows))):
        raise ValueError(
            f"The message has targets for {len(targets)} positions, but its {len(rows)} examples have {expected} "
            "positions. Give the server and the clients the same `public_dataset` and, if they predict tokens, the "
            "same tokenizer."
        )
