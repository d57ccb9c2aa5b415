"""F1 over answers and exact match over questions, as defined by MultiRC and SuperGLUE."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Features, Value

from .base import LocalMetric


class MultiRC(LocalMetric):
    """
    F1 over answers and exact match over questions, for questions with any number of correct answers.

    Label 1 means that an answer is correct. `f1a` is the F1 of label 1 over the answers of all questions together,
    2·TP / (2·TP + FP + FN). It is 0 if no answer is correct or predicted to be correct. `exact_match` is the fraction
    of questions for which all answers are labeled correctly. Sources: Khashabi et al., "Looking Beyond the Surface"
    (2018), section 4; Wang et al., "SuperGLUE" (2019), section 3, which names the metrics F1a and EM. A prediction
    other than 0 and 1 is not a positive prediction in F1, and its question is not an exact match.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no inputs.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import MultiRC

    >>> questions = ["where", "where", "when", "when"]
    >>> MultiRC().compute(predictions=[1, 0, 1, 1], references=[1, 0, 1, 0], questions=questions)
    {'f1a': 0.8, 'exact_match': 0.5}

    ```
    """

    summary = "F1 over answers, and exact match over questions."
    inputs = "predictions, references: 1 for a correct answer, else 0. questions: its question."
    features_of_inputs = Features(
        {"predictions": Value("int64"), "references": Value("int64"), "questions": Value("string")}
    )

    def _compute(self, predictions: list[int], references: list[int], questions: list[str]) -> dict[str, Any]:
        predicted, true = np.array(predictions), np.array(references)
        true_positives = int(((predicted == 1) & (true == 1)).sum())
        denominator = int((predicted == 1).sum() + (true == 1).sum())  # 2·TP + FP + FN
        _, question_of = np.unique(questions, return_inverse=True)
        wrong = np.bincount(question_of, weights=predicted != true)
        return {
            "f1a": 2 * true_positives / denominator if denominator else 0.0,
            "exact_match": float(np.mean(wrong == 0)),
        }
