"""The logits and the labels of test examples, for metrics that need one label per example."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LabelLogits:
    """
    The logits of a model for the labels of examples, and the correct labels.

    Args:
        logits (`np.ndarray` of shape `(examples, labels)`): The logits, or unnormalized log-probabilities.
        labels (`np.ndarray` of shape `(examples,)`, `int64`): The correct label of each example, from 0.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.tasks.label_logits import LabelLogits

    >>> LabelLogits(np.array([[0.0, 2.0], [1.0, 0.0]]), np.array([1, 1])).correct.tolist()
    [True, False]

    ```
    """

    logits: np.ndarray
    labels: np.ndarray

    @property
    def correct(self) -> np.ndarray:
        """Whether the label with the highest logit is the correct label, of shape `(examples,)`."""
        result: np.ndarray = np.argmax(self.logits, axis=-1) == self.labels
        return result
