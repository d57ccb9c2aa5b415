"""ROUGE-1, ROUGE-2 and ROUGE-L of generated texts, from rouge-score (extra `metrics`)."""

from __future__ import annotations

from typing import Any

import evaluate
import numpy as np
from datasets import Features, List, Value

from .base import LocalMetric, require_extra


ROUGE_TYPES = ("rouge1", "rouge2", "rougeL")


class Rouge(LocalMetric):
    """
    F-measure of shared words (ROUGE-1), pairs of words (ROUGE-2) and of the longest common subsequence (ROUGE-L).

    Each is 2·s / (n_prediction + n_reference) for s shared units, averaged over rows; of several references of a row
    the one with the best F-measure counts, for each ROUGE by itself. Source: Lin, "ROUGE: A Package for Automatic
    Evaluation of Summaries" (2004), as in Google's rouge-score.

    rouge-score lowers the case and keeps `a` to `z` and digits only: a text in another script has no words, and
    scores 0.

    Args:
        use_stemmer (`bool`, *optional*, defaults to `False`):
            Whether words of more than three letters lose their English endings first (Porter's stemmer).
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ImportError: If rouge-score is not installed.
        ValueError: From `compute`, if there are no rows, or a row has no reference.

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

    def __init__(self, use_stemmer: bool = False, **kwargs: Any) -> None:
        require_extra("rouge_score", "rouge-score", "Rouge")
        self.use_stemmer = use_stemmer
        super().__init__(**kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="F-measures of ROUGE-1, ROUGE-2 and ROUGE-L.",
            citation="",
            inputs_description="predictions: a text a row. references: a text, or a list of texts, a row.",
            features=[
                Features({"predictions": Value("string"), "references": List(Value("string"))}),
                Features({"predictions": Value("string"), "references": Value("string")}),
            ],
        )

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(ROUGE_TYPES, use_stemmer=self.use_stemmer)
        scores = []
        for row, (prediction, targets) in enumerate(zip(predictions, references, strict=True)):
            targets = [targets] if isinstance(targets, str) else targets
            if not targets:
                raise ValueError(f"Row {row} has no reference text. Give it one, or drop the row.")
            best = scorer.score_multi(targets, prediction)
            scores.append([best[rouge_type].fmeasure for rouge_type in ROUGE_TYPES])
        return dict(zip(ROUGE_TYPES, np.mean(scores, axis=0).tolist(), strict=True))
