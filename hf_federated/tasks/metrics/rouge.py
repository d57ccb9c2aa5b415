"""ROUGE-1, ROUGE-2 and ROUGE-L of generated texts, from rouge-score (extra `metrics`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...utils.optional_packages import require_packages
from .base import TEXT_FEATURES, LocalMetric, reference_texts


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


class Rouge(LocalMetric):
    """
    F-measures of shared words (ROUGE-1), word pairs (ROUGE-2) and longest common subsequences (ROUGE-L).

    Each F-measure is 2·s / (n_prediction + n_reference) for s shared units, averaged over examples. If an example has
    several references, each ROUGE metric uses the reference with its best F-measure. Source: Lin, "ROUGE: A Package
    for Automatic Evaluation of Summaries" (2004), as implemented in Google's rouge-score.

    rouge-score converts texts to lower case and keeps only `a` to `z` and digits. Texts in other scripts therefore
    have no words and score 0.

    Args:
        use_stemmer (`bool`, *optional*, defaults to `False`):
            Whether to remove English suffixes from words of more than three letters (Porter stemmer).
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ImportError: If rouge-score is not installed.
        ValueError: From `compute`, if there are no inputs or an example has no reference.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import Rouge

    >>> scores = Rouge().compute(predictions=["a cold winter day"], references=["a cold and windy day"])
    >>> {name: round(score, 3) for name, score in scores.items()}
    {'rouge1': 0.667, 'rouge2': 0.286, 'rougeL': 0.667}
    >>> Rouge().compute(predictions=["warm days"], references=[["cold days", "warm days"]])["rouge2"]
    1.0

    ```
    """

    summary = "F-measures of ROUGE-1, ROUGE-2 and ROUGE-L."
    inputs = "predictions: one text per example. references: one text per example, or a list."
    features_of_inputs = TEXT_FEATURES

    def __init__(self, use_stemmer: bool = False, **kwargs: Any) -> None:
        require_packages("Rouge", {"metrics": {"rouge_score": "rouge-score"}})
        self.use_stemmer = use_stemmer
        super().__init__(**kwargs)

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(ROUGE_TYPES, use_stemmer=self.use_stemmer)
        scores = []
        for row, (prediction, targets) in enumerate(zip(predictions, references, strict=True)):
            best = scorer.score_multi(reference_texts(targets, row), prediction)
            scores.append([best[rouge_type].fmeasure for rouge_type in ROUGE_TYPES])
        return dict(zip(ROUGE_TYPES, np.mean(scores, axis=0).tolist(), strict=True))
