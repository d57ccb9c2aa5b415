"""Macro F1, weighted F1 and the F1 of a single class, as defined by scikit-learn (extra `metrics`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...utils.optional_packages import require_packages
from .base import LabelMetric


class F1(LabelMetric):
    """
    Macro and weighted F1: means over classes of 2·TP / (2·TP + FP + FN).

    In the macro mean, all classes have the same weight. In the weighted mean, the weight of a class is its number of
    references. A class that occurs neither in the predictions nor in the references is ignored, unless it is in
    `labels`. Its F1 is then 0, as in scikit-learn. To compare clients with different sets of classes, set `labels`.

    Args:
        labels (`Sequence[int]`, *optional*):
            The classes to include. Defaults to the classes that occur in the predictions or the references.
        positive_label (`int`, *optional*):
            A class whose F1 is also returned, as `f1`. This F1 is 0 if the class does not occur.
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ImportError: If scikit-learn is not installed.
        ValueError: If `labels` is empty. `compute` raises it if there are no inputs.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import F1

    >>> scores = F1().compute(predictions=[0, 0, 1, 1], references=[0, 0, 0, 1])
    >>> {name: round(score, 3) for name, score in scores.items()}
    {'f1_macro': 0.733, 'f1_weighted': 0.767}
    >>> round(F1(labels=range(3)).compute(predictions=[0, 0, 1, 1], references=[0, 0, 0, 1])["f1_macro"], 3)
    0.489

    ```
    """

    summary = "Macro and weighted F1 over classes."

    def __init__(self, labels: Sequence[int] | None = None, positive_label: int | None = None, **kwargs: Any) -> None:
        require_packages("F1", {"metrics": {"sklearn": "scikit-learn"}})
        if labels is not None and len(labels) == 0:
            raise ValueError("`labels` is empty. List at least one class, or omit it to use the classes that occur.")
        self.labels = None if labels is None else list(labels)
        self.positive_label = positive_label
        super().__init__(**kwargs)

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, Any]:
        from sklearn.metrics import f1_score

        scores = {
            f"f1_{average}": float(
                f1_score(references, predictions, labels=self.labels, average=average, zero_division=0)
            )
            for average in ("macro", "weighted")
        }
        if self.positive_label is None:
            return scores
        positive_f1 = f1_score(references, predictions, labels=[self.positive_label], average="macro", zero_division=0)
        return {**scores, "f1": float(positive_f1)}
