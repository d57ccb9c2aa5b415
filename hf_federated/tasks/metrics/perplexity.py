"""Perplexity of texts from what a model already computed: log-likelihoods and numbers of tokens."""

from __future__ import annotations

from typing import Any

import evaluate
import numpy as np
from datasets import Features, Value

from .base import LocalMetric


class Perplexity(LocalMetric):
    """
    exp(Σ negative log-likelihood / Σ tokens), over the predicted tokens of all rows.

    Every token weighs the same, however rows are batched. The exponential of a mean of batch losses weighs tokens of
    short rows more, and differs.

    A row is whatever was summed up: a text, a block, a batch. Its inputs are named apart from those of other metrics,
    so in `evaluate.combine` give both with `add_batch(predictions=..., references=..., nll=..., num_tokens=...)`.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no rows or no tokens, or a number of tokens is negative.

    Example:

    ```python
    >>> import math
    >>> from hf_federated.tasks.metrics import Perplexity

    >>> round(Perplexity().compute(nll=[3 * math.log(2), math.log(32)], num_tokens=[3, 1])["perplexity"], 6)
    4.0

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Exponential of the mean negative log-likelihood of a token.",
            citation="",
            inputs_description=(
                "nll: the negative log-likelihood of a row, summed over its tokens, in nats. num_tokens: how many."
            ),
            features=Features({"nll": Value("float64"), "num_tokens": Value("int64")}),
            format="numpy",
        )

    def _compute(self, nll: np.ndarray, num_tokens: np.ndarray) -> dict[str, Any]:
        if (num_tokens < 0).any():
            row = int(np.argmax(num_tokens < 0))
            raise ValueError(f"Row {row} has {num_tokens[row]} tokens; count those that were predicted.")
        if num_tokens.sum() == 0:
            raise ValueError(
                "No row has a token to predict, so there is no perplexity. Texts need two tokens or more."
            )
        with np.errstate(over="ignore"):
            return {"perplexity": float(np.exp(nll.sum() / num_tokens.sum()))}
