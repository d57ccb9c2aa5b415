"""Temperature scaling: the loss of a model whose confidence is corrected by one number.

The temperature is chosen on validation examples and used on test examples, so it never reads a test label. Predictions
and accuracy do not change. Source: [On Calibration of Modern Neural Networks](https://arxiv.org/abs/1706.04599)
(Guo et al., 2017), section 4.2.
"""

from __future__ import annotations

import numpy as np


# Range of temperatures. Without a lower bound, a model that makes no error on the validation examples would get
# temperature 0 and an infinite test loss. Without an upper bound, a model below guessing would get an infinite one.
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0
# Bisections of the logarithm of the range, after which the interval is smaller than the precision of float64.
NUM_BISECTIONS = 60


def log_probabilities(logits: np.ndarray, labels: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """
    Log-probability of each label under softmax(logits / temperature), in nats.

    Args:
        logits (`np.ndarray` of shape `(examples, labels)`): The logits. −∞ excludes a label of an example.
        labels (`np.ndarray` of shape `(examples,)`, integer): The correct label of each example, from 0.
        temperature (`float`, *optional*, defaults to 1.0): Divides the logits. Above 0.

    Returns:
        `np.ndarray` of shape `(examples,)`, `float64`. NaN for an example whose logits contain NaN or +∞.

    Raises:
        ValueError: If the shapes do not match, there are no examples, or a label is out of range.

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.experiments.calibration import log_probabilities

    >>> np.exp(log_probabilities(np.log([[1, 3], [2, 2]]), np.array([1, 0]))).round(6).tolist()
    [0.75, 0.5]

    ```
    """
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not logits.size:
        raise ValueError(
            f"`logits` has the shape {logits.shape} and `labels` has the shape {labels.shape}. Pass logits of shape"
            " (examples, labels) and one label for each example, with at least one example."
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"`labels` has the type {labels.dtype} and values from {labels.min()} to {labels.max()}. Labels must be"
            f" integers from 0 to {logits.shape[1] - 1}."
        )
    with np.errstate(invalid="ignore"):  # a row with NaN or +inf becomes NaN
        scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature
        chosen = scaled[np.arange(len(labels)), labels]
        result: np.ndarray = chosen - np.log(np.exp(scaled).sum(axis=1))
    return result


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """
    Find the temperature with the lowest cross-entropy.

    With β = 1 / temperature, the cross-entropy is convex in β. Its derivative is the mean over the examples of
    Σ_j p_j z_j − z_y, where p = softmax(β z), z are the logits and y is the label. The function bisects the range from
    0.01 to 100 at the sign of this derivative.

    Args:
        logits (`np.ndarray` of shape `(examples, labels)`): The logits of validation examples.
        labels (`np.ndarray` of shape `(examples,)`, integer): Their labels.

    Returns:
        `float`: The temperature, at a bound of the range if the cross-entropy is lowest there. NaN if a logit is NaN
            or +∞, or if the logit of a label is −∞.

    Raises:
        ValueError: As [`log_probabilities`].

    Example:

    ```python
    >>> import numpy as np
    >>> from hf_federated.experiments.calibration import fit_temperature

    >>> # The odds are 9 to 1, but one of four labels is the unlikely one. Odds of 3 to 1 need 9 ** (1 / 2).
    >>> round(fit_temperature(np.log([[9, 1]] * 4), np.array([0, 0, 0, 1])), 6)
    2.0

    ```
    """
    if not np.isfinite(log_probabilities(logits, labels)).all():
        return float("nan")
    centered = logits - np.max(logits, axis=1, keepdims=True)
    # Labels with the logit −∞ have the probability 0 at each temperature.
    finite = np.where(np.isfinite(centered), centered, 0.0).astype(np.float64)
    correct = finite[np.arange(len(labels)), labels]
    low, high = np.log(1 / MAX_TEMPERATURE), np.log(1 / MIN_TEMPERATURE)

    def slope(log_beta: float) -> float:
        weights = np.exp(centered * np.exp(log_beta))
        expected = (weights * finite).sum(axis=1) / weights.sum(axis=1)
        return float((expected - correct).mean())

    if slope(low) >= 0:
        return MAX_TEMPERATURE
    if slope(high) <= 0:
        return MIN_TEMPERATURE
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return float(np.exp(-(low + high) / 2))


def calibrated_loss(
    validation_logits: np.ndarray, validation_labels: np.ndarray, test_logits: np.ndarray, test_labels: np.ndarray
) -> tuple[float, float]:
    """
    Cross-entropy on test examples at the temperature that is best on validation examples, in nats.

    The validation examples must not be training examples: a model is more confident on training examples than on other
    examples, so they give too low a temperature.

    Args:
        validation_logits (`np.ndarray` of shape `(validation examples, labels)`): Logits of validation examples.
        validation_labels (`np.ndarray` of shape `(validation examples,)`, integer): Their labels.
        test_logits (`np.ndarray` of shape `(test examples, labels)`): Logits of test examples.
        test_labels (`np.ndarray` of shape `(test examples,)`, integer): Their labels.

    Returns:
        `tuple[float, float]`: The loss and the temperature. Both are NaN if the temperature cannot be determined.

    Raises:
        ValueError: As [`log_probabilities`].

    Example:

    ```python
    >>> import math
    >>> import numpy as np
    >>> from hf_federated.experiments.calibration import calibrated_loss

    >>> logits = np.log([[9, 1]] * 4)
    >>> loss, temperature = calibrated_loss(logits, np.array([0, 0, 0, 1]), logits[:1], np.array([0]))
    >>> round(loss, 6) == round(-math.log(3 / 4), 6)  # odds of 9 ** (1 / 2) to 1
    True

    ```
    """
    temperature = fit_temperature(validation_logits, validation_labels)
    return float(-log_probabilities(test_logits, test_labels, temperature).mean()), temperature
