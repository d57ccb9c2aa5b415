"""`DistillationPart`: the client half of a distillation, which predicts and learns public examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..clients.models import OwnModel
from ..clients.positions import Positions
from ..clients.student import Student
from ..messages import Distill, Feedback, Message, Metrics, Predict, Predictions, PublicRowsMessage
from ..messages.validation import RefusedRequestError, refusing
from ..methods import ClientPart
from ..utils.meta_tensors import to_cpu
from ..utils.random import isolated_rng
from .encoding import Encoding, Targets
from .lazy_rows import concatenate_encoded
from .losses import kl_divergence
from .public_rows import PublicRows


class DistillationPart(ClientPart):
    """
    Client half of a distillation. `client_part` of a [`Distillation`] names its class.

    Write one if clients learn the targets with a loss of your method. The base class learns them with KL divergence.

    A subclass overrides the loss with which the client learns the targets of the server.

    Example:

    ```python
    >>> from hf_federated import DistillationPart
    >>> from hf_federated.distillation import soft_cross_entropy

    >>> class LearnProbabilities(DistillationPart):
    ...     def client_loss(self, logits, targets, settings):
    ...         return soft_cross_entropy(logits, targets)
    ```
    """

    @property
    def encoding(self) -> Encoding:
        """Encodes predictions and decodes targets."""
        return self.method.encoding

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        """
        The client's loss on a batch of public examples.

        Args:
            logits (`torch.Tensor`): Logits of the client's model, of shape `(rows, classes)`.
            targets (`torch.Tensor`): Targets of these examples, of the same shape.
            settings (`Mapping[str, Any]`): Settings of the message.
        """
        return kl_divergence(logits, targets, self.method.temperature)

    def feedback_loss(self, logits: torch.Tensor, message: Feedback) -> torch.Tensor:
        """
        The client's loss on the mini-batch that a [`Feedback`] message answers.

        Args:
            logits (`torch.Tensor`): Logits of the client's model, of shape `(rows, classes)`, with their graph.
            message ([`Feedback`]): The server's answer.

        Raises:
            NotImplementedError: If the method does not exchange mini-batches.
        """
        raise NotImplementedError(f"{type(self.method).__name__} does not exchange mini-batches.")

    def check_request(self, message: Message) -> None:
        """
        Check that the method's server half sends such a message.

        Args:
            message ([`Message`]): The server's message.

        Raises:
            RefusedRequestError: If the server half does not send it.
        """
        if type(self).feedback_loss is DistillationPart.feedback_loss:
            if isinstance(message, Feedback):
                raise RefusedRequestError(message, "feedback", "follows a prediction", "no feedback")
            if isinstance(message, Predict) and message.keeps_graph:
                raise RefusedRequestError(message, "keeps_graph", "is True", "no feedback")
        if isinstance(message, Feedback) and message.step >= message.num_training_steps:
            found = f"is {message.step}"
            raise RefusedRequestError(
                message, "step", found, f"a step of `num_training_steps`, {message.num_training_steps}"
            )
        epochs = self.method.client_epochs
        if isinstance(message, Distill) and not 1 <= message.num_epochs <= epochs:
            found = f"is {message.num_epochs}"
            raise RefusedRequestError(message, "num_epochs", found, f"1 to {epochs} epochs (`client_epochs`)")
        if isinstance(message, Distill) and message.num_epochs > message.num_training_epochs:
            found = f"is {message.num_training_epochs}"
            raise RefusedRequestError(message, "num_training_epochs", found, f"at least {message.num_epochs} epochs")

    def answer(self, message: Message) -> Message:
        """
        Answer a message about public examples.

        Args:
            message ([`Message`]): The server's message.

        Raises:
            TypeError: If the client has no own model or no public examples.
        """
        context = self.context
        if not isinstance(context.model, OwnModel) or context.model.student is None:
            raise TypeError(
                f"The client cannot answer a {type(message).__name__}, because it has no own model or no public "
                "examples. Pass `public_dataset` to the trainer of the client."
            )
        self.check_request(message)
        if isinstance(message, Predict):
            return self.predict(message, context.model, context.student)
        if isinstance(message, Distill):
            return self.distill(message, context.model, context.student)
        if isinstance(message, Feedback):
            return self.take_feedback(message, context.model, context.student)
        return super().answer(message)

    def predict(self, message: Predict, model: OwnModel, student: Student) -> Predictions:
        """Predict the public examples of the message."""
        rows = rows_of(message, student)
        if student.positions is not None:
            student.positions.agree(rows)
        if message.keeps_graph:
            logits = _training_forward(message, student)
            model.pending = (_place(message), logits)
            values = self.encoding.encode(to_cpu(logits.detach()))
        elif student.positions is None:
            values = self.encoding.encode(student.predict(rows))
        else:
            values = concatenate_encoded(student.predict_batches(rows, self.encoding.encode))
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
        with refusing(message, "targets"):
            if student.positions is None:
                targets: Targets = self.encoding.decode_targets(message.targets, student.num_classes)
                expected = len(rows)
            else:
                encoded = _targets(message, student.positions, rows)
                targets = self.encoding.unpack_targets(encoded, student.num_classes)
                expected = len(student.positions.agreed_of(rows))
            if len(targets) != expected:
                raise ValueError(
                    f"The message has targets for {len(targets)} positions, but its {len(rows)} examples have "
                    f"{expected} positions. Give the server and the clients the same `public_dataset` and, if they "
                    "predict tokens, the same tokenizer."
                )
        with model.restore_on_failure():
            loss = student.fit(
                rows,
                targets,
                lambda logits, batch: self.client_loss(logits, batch, message.settings),
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
        positions, rows = student.positions, rows_of(message, student)
        if positions is not None:
            # As in the prediction, use all positions that the client's tokenizer keeps.
            positions.agree(rows)
        logits = pending[1] if pending and pending[0] == _place(message) else _training_forward(message, student)
        if positions is not None:
            with refusing(message, "targets"):
                message = dataclasses.replace(message, targets=_targets(message, positions, rows))
            logits = logits[positions.agreed_among_seen(rows).to(logits.device)]

        def feedback_loss() -> torch.Tensor:
            with refusing(message, "feedback"):
                return self.feedback_loss(logits, message)

        loss = student.learn(feedback_loss)
        return Metrics(message.round, message.client_id, num_examples=len(rows), metrics={"distillation_loss": loss})


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


def _targets(message: Distill | Feedback, positions: Positions, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The encoded targets of a message. Positions that the targets leave out are excluded from the exchange."""
    targets, absent = positions.take_absent(rows, message.targets)
    positions.agree(rows, absent)
    return targets
