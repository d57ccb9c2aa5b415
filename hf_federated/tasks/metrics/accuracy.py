"""Accuracy: the fraction of examples with the correct predicted label."""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import LabelMetric


class Accuracy(LabelMetric):
    """
    The fraction of predictions that equal their reference, for integer labels.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no inputs.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import Accuracy

    >>> Accuracy().compute(predictions=[0, 1, 1, 2], references=[0, 1, 2, 2])
    {'accuracy': 0.75}

    ```
    """

    summary = "Fraction of predictions that equal their reference."

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, Any]:
        return {"accuracy": float(np.mean(predictions == references))}
