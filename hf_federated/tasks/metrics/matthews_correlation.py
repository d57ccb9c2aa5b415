"""Matthews correlation coefficient of predicted and correct labels, for two or more classes (extra `metrics`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...utils.optional_packages import require_packages
from .base import LabelMetric


class MatthewsCorrelation(LabelMetric):
    """
    The Matthews correlation coefficient: 1 for perfect predictions, about 0 for predictions independent of the labels.

    For n examples with c correct predictions, and t_k references and p_k predictions of class k:
    (c·n − Σ t_k·p_k) / √((n² − Σ p_k²)(n² − Σ t_k²)), from Gorodkin, "Comparing two K-category assignments by a
    K-category correlation coefficient" (2004). For two classes, it is the coefficient of Matthews (1975). It is 0 if
    all predictions or all references have the same class.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ImportError: If scikit-learn is not installed.
        ValueError: From `compute`, if there are no inputs.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import MatthewsCorrelation

    >>> MatthewsCorrelation().compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1])
    {'matthews_correlation': 0.5773502691896258}

    ```
    """

    summary = "Matthews correlation coefficient."

    def __init__(self, **kwargs: Any) -> None:
        require_packages("MatthewsCorrelation", {"metrics": {"sklearn": "scikit-learn"}})
        super().__init__(**kwargs)

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, Any]:
        from sklearn.metrics import matthews_corrcoef

        if len(np.union1d(predictions, references)) < 2:
            return {"matthews_correlation": 0.0}  # scikit-learn returns the same value, with a warning
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
