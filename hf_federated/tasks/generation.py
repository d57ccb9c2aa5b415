"""Shared code of the tasks in which a model generates a target text from a source text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

from .base import Task
from .columns import Batch, is_blank, read_column, row_name


@dataclass(frozen=True)
class GenerationTask(Task):
    """
    Base class of the tasks that generate a target from a source. [`Seq2Seq`] and [`Summarization`] describe the
    arguments.
    """

    source_column: str = "source"
    target_column: str = "target"
    prefix: str = ""

    # The metric for comparing runs.
    main_metric = "rougeL"
    metric_names: ClassVar[tuple[str, ...]] = ("rouge1", "rouge2", "rougeL")
    trainer_class: ClassVar[type[Trainer]] = Seq2SeqTrainer
    arguments_class: ClassVar[type[TrainingArguments]] = Seq2SeqTrainingArguments

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that the task reads."""
        return (self.source_column, self.target_column)

    def find_empty(self, batch: Batch) -> list[bool]:
        """Find examples without a source or without a target, or with an empty target in a list."""
        rows = zip(read_column(batch, self.source_column), read_column(batch, self.target_column), strict=True)
        return [is_blank(source) or _is_empty_target(target) for source, target in rows]


def read_targets(batch: Batch, column: str, indices: Sequence[int] | None) -> list[list[str]]:
    """
    Return the targets of each example. Each example has at least one target, and no target is empty.

    Args:
        batch (`Mapping[str, Sequence]`): Raw columns.
        column (`str`): The column with a target or a list of targets per example.
        indices (`Sequence[int]`, *optional*): Row numbers for error messages.

    Raises:
        ValueError: If an example has no target or an empty target. The message contains the row number.
    """
    rows = []
    for position, value in enumerate(read_column(batch, column)):
        if _is_empty_target(value):
            raise ValueError(
                f"{row_name(position, indices)} has no target or an empty one in the column {column!r}. Drop such"
                " rows, or encode with `with_labels=False`."
            )
        rows.append([value] if isinstance(value, str) else list(value))
    return rows


def _is_empty_target(value: Any) -> bool:
    """Whether a target or a list of targets is missing, or contains a target that is blank or not a string."""
    targets = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    return not targets or any(map(is_blank, targets))


def check_num_rows(num_predictions: int, num_rows: int) -> None:
    """
    Check that there is one prediction for each raw example.

    Args:
        num_predictions (`int`): Number of predictions.
        num_rows (`int`): Number of raw examples.

    Raises:
        ValueError: If the numbers differ.
    """
    if num_predictions != num_rows:
        raise ValueError(f"There are {num_predictions} predictions, but {num_rows} `rows`. Pass the evaluated rows.")
