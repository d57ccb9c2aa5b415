"""F1 over answers and exact match over questions, as MultiRC and SuperGLUE define them."""

from __future__ import annotations

from typing import Any

import evaluate
import numpy as np
from datasets import Features, Value

from .base import LocalMetric


class MultiRC(LocalMetric):
    """
    How well each answer of a question is called right or wrong, where any number of them is right.

    With a label 1 for right, `f1a` is the F1 of label 1 over the answers of all questions together,
    2·TP / (2·TP + FP + FN), and 0 where no answer is right or called so. `exact_match` is the share of questions of
    which all answers are labelled right (Khashabi et al., "Looking Beyond the Surface" (2018), section 4; Wang et al.,
    "SuperGLUE" (2019), section 3, where the two are named F1a and EM). A prediction that is neither 0 nor 1 calls an
    answer neither right nor wrong: it is no positive of F1, and its question no match.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no rows.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import MultiRC

    >>> questions = ["where", "where", "when", "when"]
    >>> MultiRC().compute(predictions=[1, 0, 1, 1], references=[1, 0, 1, 0], questions=questions)
    {'f1a': 0.8, 'exact_match': 0.5}

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="F1 over answers, and exact match over questions.",
            citation="",
            inputs_description="predictions, references: 1 for a right answer, else 0. questions: what it answers.",
            features=Features(
                {"predictions": Value("int64"), "references": Value("int64"), "questions": Value("string")}
            ),
        )

    def _compute(self, predictions: list[int], references: list[int], questions: list[str]) -> dict[str, Any]:
        predicted, true = np.array(predictions), np.array(references)
        hits = int(((predicted == 1) & (true == 1)).sum())
        called = int((predicted == 1).sum() + (true == 1).sum())  # 2·TP + FP + FN
        _, question_of = np.unique(questions, return_inverse=True)
        wrong = np.bincount(question_of, weights=predicted != true)
        return {"f1a": 2 * hits / called if called else 0.0, "exact_match": float(np.mean(wrong == 0))}
