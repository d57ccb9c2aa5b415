"""Word-level F1 of extractive answers, as defined by SQuAD."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .answers import FEATURES, mean_best_score
from .base import LocalMetric


class TokenF1(LocalMetric):
    """
    Word-level F1 of an answer against its gold answers after SQuAD's normalization, averaged over questions.

    F1 = 2·s / (words of the answer + words of the gold answer). s is the number of shared words, where a repeated word
    counts as often as it occurs in both. The score of a question is the maximum over its gold answers (Rajpurkar et
    al., 2016). If either answer is empty, F1 is 1 if both are empty and 0 otherwise. A question without an answer has
    no gold answers, or only empty ones (Rajpurkar et al., 2018).

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no inputs.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import TokenF1

    >>> TokenF1().compute(predictions=["in the city of Paris"], references=[["Paris", "city of Paris"]])
    {'token_f1': 0.8571428571428571}

    ```
    """

    summary = "Word-level F1 of answers after SQuAD's normalization."
    inputs = "predictions: one answer per example, '' for none. references: a list of gold answers."
    features_of_inputs = FEATURES

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        return {"token_f1": mean_best_score(_word_f1, predictions, references)}


def _word_f1(answer: str, gold: str) -> float:
    words, gold_words = answer.split(), gold.split()
    if not words or not gold_words:
        return float(words == gold_words)
    shared = (Counter(words) & Counter(gold_words)).total()
    return 2 * shared / (len(words) + len(gold_words))
