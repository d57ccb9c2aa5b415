"""What a client does with messages about public rows: it predicts them, and trains on predictions of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from ..messages import (
    CLASS_COUNT,
    Distill,
    Feedback,
    Metrics,
    Predict,
    Predictions,
    PublicRowsMessage,
    public_order,
)
from ..utils.random import derived_seed, own_draws
from .models import ClientModel, OwnModel
from .positions import Positions
from .student import LABEL_COLUMNS, Rows, Student


def rows_of(message: PublicRowsMessage, student: Student) -> torch.Tensor:
    """
    The public rows that a message is about.

    Returns:
        `torch.Tensor`: Row numbers, of shape `(stop - start,)`.

    Raises:
        ValueError: If it names rows that there are not.
    """
    if not 0 <= message.start < message.stop <= student.num_rows:
        raise ValueError(
            f"The message is about the public rows {message.start} to {message.stop}, and this client has "
            f"{student.num_rows}. Server and clients need the same public data set."
        )
    return public_order(student.num_rows, message.order)[message.start : message.stop]


def _place(message: PublicRowsMessage) -> tuple[Any, ...]:
    return message.round, message.order, message.start, message.stop, message.seed


def _training_forward(message: PublicRowsMessage, student: Student) -> torch.Tensor:
    student.model.train()
    rows = student.with_positions(rows_of(message, student))
    if not len(rows):
        return torch.zeros(0, student.num_classes, device=student.device)
    with own_draws(message.seed):
        return student.forward(student.inputs(rows))


def _targets(message: Distill | Feedback, student: Student) -> dict[str, torch.Tensor]:
    """The targets of a message, as the algorithm's codec writes them; what they leave out is agreed to."""
    if student.positions is None:
        return message.targets
    rows = rows_of(message, student)
    targets, absent = student.positions.take_absent(rows, message.targets)
    student.positions.agree(rows, absent)
    return targets


def predict(message: Predict, model: OwnModel, student: Student, algorithm: Any) -> Predictions:
    """The model's predictions of the rows asked for."""
    rows = rows_of(message, student)
    if student.positions is not None:
        student.positions.agree(rows)
    if message.keeps_graph:
        logits = _training_forward(message, student)
        model.pending = (_place(message), logits)
        values = algorithm.encode(logits.detach().cpu())
    elif student.positions is None:
        values = algorithm.encode(student.predict(rows))
    else:
        values = algorithm.joined(student.predict_batches(rows, algorithm.encode))
    if student.positions is not None:
        values = student.positions.add_absent(rows, values)
    return Predictions(message.round, message.client_id, values)


def _check_count(targets: Rows, positions: Positions, rows: torch.Tensor) -> None:
    if len(targets) != (expected := len(positions.agreed_of(rows))):
        raise ValueError(
            f"There are targets of {len(targets)} positions, and {expected} in the {len(rows)} rows that they are "
            "for. Server and clients need the same public data set and, where they predict tokens, the same tokenizer."
        )


def distill(message: Distill, model: OwnModel, student: Student, algorithm: Any) -> Metrics:
    """Train the model on predictions of the rows."""
    rows = rows_of(message, student)
    steps_an_epoch = -(-len(rows) // student.batch_size)
    student.prepare(message.num_training_epochs * steps_an_epoch, message.round * message.num_epochs * steps_an_epoch)
    if student.positions is None:
        targets = algorithm.decode_targets(message.targets, student.num_classes)
    else:
        targets = algorithm.unpack_targets(_targets(message, student), student.num_classes)
        _check_count(targets, student.positions, rows)
    with model.restored_on_failure():
        loss = student.fit(
            rows,
            targets,
            lambda logits, some: algorithm.client_loss(logits, some, message.settings),
            message.num_epochs,
            message.seed,
        )
    return Metrics(message.round, message.client_id, num_examples=len(rows), metrics={"distillation_loss": loss})


def take_feedback(message: Feedback, model: OwnModel, student: Student, algorithm: Any) -> Metrics:
    """
    Take one step on the mini-batch that was predicted last.

    The forward pass of the prediction is used again. Of a model that was put away meanwhile it is done again, with the
    same dropout: the gradients are the same bytes.
    """
    student.prepare(message.num_training_steps, message.step)
    pending, model.pending = model.pending, None
    if student.positions is not None:
        # As it was predicted: all that this model has a place for.
        student.positions.agree(rows_of(message, student))
    if pending is not None and pending[0] == _place(message):
        logits = pending[1]
    else:
        logits = _training_forward(message, student)
    if student.positions is not None:
        rows = rows_of(message, student)
        message = dataclasses.replace(message, targets=_targets(message, student))
        logits = logits[student.positions.agreed_among_seen(rows).to(logits.device)]
    loss = student.step(algorithm.feedback_loss(logits, message))
    num_rows = message.stop - message.start
    return Metrics(message.round, message.client_id, num_examples=num_rows, metrics={"distillation_loss": float(loss)})


def compare_features(dataset: Any, model: ClientModel, algorithm: Any, seed: int) -> dict[str, torch.Tensor]:
    """
    What a client finds out once of its rows and the public ones, from the features that its model has of them.

    Args:
        dataset (`datasets.Dataset`): The client's encoded rows.
        model ([`ClientModel`]): The client's, as it was before the first round.
        algorithm ([`~hf_federated.Distillation`]): Compares them, and says of how many rows.
        seed (`int`): The client's, for this purpose alone.
    """
    assert model.student is not None
    most = algorithm.max_feature_rows
    if most is not None and most < len(dataset):
        dataset = dataset.select(public_order(len(dataset), derived_seed(seed, "rows"))[:most].tolist())
    # Even an import draws: scikit-learn's, where a client is the first in its process.
    with own_draws(seed):
        return algorithm.client_setup(model.student.features(dataset), model.student.features(), seed)


def class_counts(dataset: Any, model: ClientModel, algorithm: Any) -> dict[str, float]:
    """
    How many rows of each class a client has, as it reports them.

    Args:
        dataset (`datasets.Dataset`): The client's encoded rows, with one label each.
        model ([`ClientModel`]): The client's.
        algorithm ([`~hf_federated.Distillation`]): Says what labels look like that a model writes.

    Raises:
        ValueError: If the rows have no such labels, or one that the model does not know.
    """
    assert model.student is not None
    column = next((name for name in LABEL_COLUMNS if name in dataset.column_names), None)
    sequences = algorithm.label_sequences(model.trainer.processing_class)
    if sequences is not None and column is not None:
        return _named(_sequence_counts(dataset[column], sequences))
    labels = np.asarray([] if column is None else dataset[column])
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"Rows of each class are counted in a column of whole numbers, {' or '.join(LABEL_COLUMNS)}; the columns "
            f"are {dataset.column_names}. weighting='size' needs none."
        )
    counts = np.bincount(labels, minlength=model.student.num_classes)
    if len(counts) > model.student.num_classes:
        raise ValueError(
            f"A row has the label {labels.max()}, and the model knows {model.student.num_classes} classes."
        )
    return _named(counts)


def _named(counts: Any) -> dict[str, float]:
    return {f"{CLASS_COUNT}{label}": float(count) for label, count in enumerate(counts)}


def _sequence_counts(labels: Any, sequences: torch.Tensor) -> list[int]:
    """How many rows have each of the label texts, by their tokens."""
    classes = {tuple(row[row >= 0].tolist()): number for number, row in enumerate(sequences)}
    counts = [0] * len(sequences)
    for row, tokens in enumerate(labels):
        found = classes.get(tuple(token for token in tokens if token >= 0))
        if found is None:
            raise ValueError(
                f"Row {row} has a label, tokens {list(tokens)[:8]}, that is none of the {len(counts)} label texts of "
                "the distillation: `label_texts` must name all of them."
            )
        counts[found] += 1
    return counts
