"""Perplexity from log-likelihoods and token counts that a model already computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Features, Value

from .base import LocalMetric


class Perplexity(LocalMetric):
    """
    exp(Σ negative log-likelihood / Σ tokens), over the predicted tokens of all inputs.

    Every token has the same weight, independent of the batches. The exponential of the mean batch loss is different,
    because it gives more weight to tokens in short examples.

    One input is the sum over a text, a block or a batch. The input names differ from those of other metrics. With
    `evaluate.combine`, pass all inputs: `add_batch(predictions=..., references=..., nll=..., num_tokens=...)`.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no inputs or no tokens, or a number of tokens is negative.

    Example:

    ```python
    >>> import math
    >>> from hf_federated.tasks.metrics import Perplexity

    >>> round(Perplexity().compute(nll=[3 * math.log(2), math.log(32)], num_tokens=[3, 1])["perplexity"], 6)
    4.0

    ```
    """

    summary = "Exponential of the mean negative log-likelihood per token."
    inputs = "nll: negative log-likelihood in nats, summed over tokens. num_tokens: the number of these tokens."
    features_of_inputs = Features({"nll": Value("float64"), "num_tokens": Value("int64")})
    array_format = "numpy"

    def _compute(self, nll: np.ndarray, num_tokens: np.ndarray) -> dict[str, Any]:
        if (num_tokens < 0).any():
            row = int(np.argmax(num_tokens < 0))
            raise ValueError(f"Row {row} has num_tokens={num_tokens[row]}. Pass the number of predicted tokens.")
        if num_tokens.sum() == 0:
            raise ValueError(
                "No row has a token to predict, so perplexity is undefined. Texts need at least two tokens."
            )
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(nll.sum() / num_tokens.sum()))}
