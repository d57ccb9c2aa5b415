"""F1 of the words of extractive answers, as SQuAD defines it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import evaluate

from .answers import FEATURES, mean_of_best
from .base import LocalMetric


class TokenF1(LocalMetric):
    """
    How much of a gold answer's words an answer has, after SQuAD's normalisation, averaged over questions.

    With s the words that the two share, each as often as it stands in both: F1 = 2·s / (words of the answer + words of
    the gold answer), the maximum over the gold answers of a question (Rajpurkar et al., 2016). If either is empty, F1
    is 1 where both are and 0 otherwise; a question without an answer has no gold answers, or empty ones (Rajpurkar et
    al., 2018).

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no rows.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import TokenF1

    >>> TokenF1().compute(predictions=["in the city of Paris"], references=[["Paris", "city of Paris"]])
    {'token_f1': 0.8571428571428571}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="F1 of the words of answers after SQuAD's normalisation.",
            citation="",
            inputs_description="predictions: an answer a row, '' for none. references: a list of gold answers a row.",
            features=FEATURES,
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        return {"token_f1": mean_of_best(_word_f1, predictions, references)}


def _word_f1(answer: str, gold: str) -> float:
    words, gold_words = answer.split(), gold.split()
    if not words or not gold_words:
        return float(words == gold_words)
    shared = (Counter(words) & Counter(gold_words)).total()
    return 2 * shared / (len(words) + len(gold_words))
