"""Evaluate the models of a run on test examples, and keep the predictions for single examples.

The metrics and the predictions are from the same pass over the test examples. If the recipe has validation examples, a
pass over them chooses the temperature of the calibrated loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction

from hf_federated.experiments.calibration import calibrated_loss
from hf_federated.experiments.predictions import MAIN_TEST, ExamplePredictions
from hf_federated.tasks import Task
from hf_federated.tasks.label_logits import LabelLogits


@dataclass(frozen=True)
class EvaluatedExamples:
    """
    The encoded examples of an evaluation and their raw rows.

    Args:
        features (`datasets.Dataset`): The encoded examples, as the trainer evaluates them.
        rows (`datasets.Dataset`): The raw rows, in the order of [`Task.label_logits`].
    """

    features: Dataset
    rows: Dataset


class Scorer:
    """
    Evaluates one or several models of a run, and keeps their predictions for the test examples.

    Args:
        task ([`Task`]): The task. If its examples have no single label, only metrics are computed.
        tests (`Mapping[str, EvaluatedExamples]`): The examples by test split, `""` for the test examples.
        validation (`EvaluatedExamples`, *optional*): Examples to choose the temperature of the calibrated loss on.
            Without them, there is no calibrated loss.
    """

    def __init__(
        self, task: Task, tests: Mapping[str, EvaluatedExamples], validation: EvaluatedExamples | None = None
    ) -> None:
        self.task = task
        self.tests = tests
        self.validation = validation
        self._scores: dict[str, list[LabelLogits]] = {}

    def evaluate(self, trainer: Any, split: str = MAIN_TEST, *args: Any, **kwargs: Any) -> dict[str, float]:
        """
        Evaluate a model as `trainer.evaluate(*args, **kwargs)`, and keep its predictions.

        Args:
            trainer (`transformers.Trainer`): The trainer of the model.
            split (`str`, *optional*): The split that `args` evaluate. Defaults to the test examples.

        Returns:
            `dict[str, float]`: The metrics. For the test examples, also `eval_calibrated_loss` and
            `eval_temperature`, if there are validation examples.
        """
        with recorded_predictions(trainer) as recorded:
            metrics: dict[str, float] = trainer.evaluate(*args, **kwargs)
        test = self._label_logits(recorded, self.tests[split])
        if test is None:
            return metrics
        self._scores.setdefault(split, []).append(test)
        if self.validation is None or split != MAIN_TEST:
            return metrics
        with recorded_predictions(trainer, with_metrics=False) as recorded:
            trainer.predict(self.validation.features)
        validation = self._label_logits(recorded, self.validation)
        if validation is None:
            return metrics
        loss, temperature = calibrated_loss(validation.logits, validation.labels, test.logits, test.labels)
        return {**metrics, "eval_calibrated_loss": loss, "eval_temperature": temperature}

    @property
    def predictions(self) -> dict[str, ExamplePredictions]:
        """The predictions by test split. For several models, means over the models."""
        return {
            split: ExamplePredictions.from_models(self.tests[split].rows, scores)
            for split, scores in self._scores.items()
        }

    def _label_logits(self, recorded: list[EvalPrediction], examples: EvaluatedExamples) -> LabelLogits | None:
        if not recorded:
            return None
        scores = self.task.label_logits(recorded[0], examples.features, examples.rows)
        return None if scores is None else LabelLogits(scores.logits.astype(np.float64), scores.labels)


@contextmanager
def recorded_predictions(trainer: Any, with_metrics: bool = True) -> Iterator[list[EvalPrediction]]:
    """
    Record the predictions of the first evaluation inside the context.

    Args:
        trainer (`transformers.Trainer`): The trainer. If it has no `compute_metrics`, nothing is recorded.
        with_metrics (`bool`, *optional*, defaults to `True`): Whether to compute the metrics of the trainer, which can
            require the test examples.

    Yields:
        `list[EvalPrediction]`: Empty until the evaluation.
    """
    compute: Callable[..., dict[str, float]] | None = trainer.compute_metrics
    recorded: list[EvalPrediction] = []
    if compute is None:
        yield recorded
        return

    def record(prediction: EvalPrediction) -> dict[str, float]:
        if not recorded:
            recorded.append(prediction)
        return compute(prediction) if with_metrics else {}

    trainer.compute_metrics = record
    try:
        yield recorded
    finally:
        trainer.compute_metrics = compute
