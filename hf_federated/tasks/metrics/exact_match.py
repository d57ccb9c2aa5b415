"""Exact match of extractive answers, as defined by SQuAD."""

from __future__ import annotations

from typing import Any

from .answers import FEATURES, mean_best_score
from .base import LocalMetric


class ExactMatch(LocalMetric):
    """
    The fraction of answers that equal one of their gold answers after SQuAD's normalization.

    The comparison ignores case, ASCII punctuation, English articles and repeated spaces (Rajpurkar et al., 2016). A
    question without an answer has no gold answers, or only empty ones. The correct prediction is then `""` (Rajpurkar
    et al., 2018).

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no inputs.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import ExactMatch

    >>> ExactMatch().compute(predictions=["The Seine.", "1889", ""], references=[["Seine"], ["1887", "in 1889"], []])
    {'exact_match': 0.6666666666666666}

    ```
    """

    summary = "Fraction of answers that equal a gold answer after SQuAD's normalization."
    inputs = "predictions: one answer per example, '' for none. references: a list of gold answers."
    features_of_inputs = FEATURES

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        return {"exact_match": mean_best_score(lambda answer, gold: float(answer == gold), predictions, references)}
