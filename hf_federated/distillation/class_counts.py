"""Label histograms: clients report the number of examples of each class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..clients.student import LABEL_COLUMNS
from ..messages import CLASS_COUNT, ClientUpdate, Disclosure
from .client import DistillationPart


NUM_EXAMPLES_PER_CLASS = Disclosure("number of examples", per="class")


def reported_class_counts(metrics: Mapping[str, float]) -> list[float]:
    """The numbers of examples of each class in the metrics of an update. A missing number becomes NaN."""
    num_classes = sum(name.startswith(CLASS_COUNT) for name in metrics)
    return [metrics.get(f"{CLASS_COUNT}{label}", math.nan) for label in range(num_classes)]


class ReportClassCounts(DistillationPart):
    """Client half of a method that needs the number of examples of each class, in the metrics of the update."""

    def send(self, update: ClientUpdate) -> ClientUpdate:
        context, method = self.context, self.method
        if not method.reports_class_counts:
            return update
        dataset, tokenizer = context.local_trainer.train_dataset, context.model.trainer.processing_class
        counts = method.class_counts(dataset, context.student.num_classes, tokenizer)
        reported = {f"{CLASS_COUNT}{label}": float(count) for label, count in enumerate(counts)}
        return dataclasses.replace(update, metrics={**update.metrics, **reported})


def count_classes(dataset: Any, num_classes: int, sequences: torch.Tensor | None = None) -> list[int]:
    """
    The number of examples of each class.

    Args:
        dataset (`datasets.Dataset`): Encoded examples with one label each.
        num_classes (`int`): Number of classes.
        sequences (`torch.Tensor`, *optional*): For a model that generates its labels as text: the token ids of each
            class, of shape `(classes, tokens)`, padded with -100.

    Raises:
        ValueError: If the examples have no integer label each, or a label is not one of the classes.
    """
    if not isinstance(dataset, Dataset):
        raise ValueError(
            "Counting the examples of each class needs a datasets.Dataset, but the client has a "
            f"{type(dataset).__name__}, whose labels are unknown before its examples are read. Pass a "
            "datasets.Dataset, or set weighting='size', which does not need the counts."
        )
    column = next((name for name in LABEL_COLUMNS if name in dataset.column_names), None)
    if sequences is not None and column is not None:
        return _count_sequences(dataset[column], sequences)
    labels = np.asarray([] if column is None else dataset[column])
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"Counting the examples of each class needs a column of integers named {' or '.join(LABEL_COLUMNS)}, but "
            f"the columns are {dataset.column_names}. Add such a column, or set weighting='size', which does not need "
            "the counts."
        )
    counts = np.bincount(labels, minlength=num_classes)
    if len(counts) > num_classes:
        raise ValueError(
            f"An example has the label {labels.max()}, but the labels of the model are 0 to {num_classes - 1}. "
            "Correct the label, or load a model with more labels."
        )
    return counts.tolist()


def _count_sequences(labels: Any, sequences: torch.Tensor) -> list[int]:
    """The number of examples with each of the label texts, compared by tokens."""
    classes = {tuple(row[row >= 0].tolist()): number for number, row in enumerate(sequences)}
    counts = [0] * len(sequences)
    for row, tokens in enumerate(labels):
        if (found := classes.get(tuple(token for token in tokens if token >= 0))) is None:
            raise ValueError(
                f"Row {row} has a label with the tokens {list(tokens)[:8]}, which differ from the tokens of all "
                f"{len(counts)} `label_texts` of the distillation. Add the missing text to `label_texts`."
            )
        counts[found] += 1
    return counts
