"""Exact match of extractive answers, as SQuAD defines it."""

from __future__ import annotations

from typing import Any

import evaluate

from .answers import FEATURES, mean_of_best
from .base import LocalMetric


class ExactMatch(LocalMetric):
    """
    The share of answers that equal one of their gold answers, after SQuAD's normalisation.

    Case, ASCII punctuation, English articles and spaces do not count (Rajpurkar et al., 2016). A question without an
    answer has no gold answers, or empty ones; the right prediction is then `""` (Rajpurkar et al., 2018).

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no rows.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import ExactMatch

    >>> ExactMatch().compute(predictions=["The Seine.", "1889", ""], references=[["Seine"], ["1887", "in 1889"], []])
    {'exact_match': 0.6666666666666666}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of answers that equal a gold answer after SQuAD's normalisation.",
            citation="",
            inputs_description="predictions: an answer a row, '' for none. references: a list of gold answers a row.",
            features=FEATURES,
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        return {"exact_match": mean_of_best(lambda answer, gold: float(answer == gold), predictions, references)}
