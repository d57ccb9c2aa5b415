"""BLEU-4 of generated texts over a whole set, without a download."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import evaluate
from datasets import Features, List, Value

from .base import LocalMetric


MAX_ORDER = 4
# Words and single punctuation marks.
WORDS = re.compile(r"\w+|[^\w\s]")


class Bleu(LocalMetric):
    """
    BLEU with runs of one to four words, over all rows together.

    BLEU = BP · exp(¼ Σ_{n=1..4} ln p_n). p_n is the share of the predictions' runs of n words that stand in a
    reference of their row, each counted at most as often as in the reference that has it most often. BP = min(1,
    exp(1 − r/c)) for predictions of c words in all; r sums over rows the length of the reference nearest in length,
    of two as near the shorter. Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine
    Translation" (2002), section 2. Nothing is smoothed: without a single shared run of four words it is 0.

    Words are runs of letters and digits, and single punctuation marks; case counts. A score depends on how words are
    told apart, and can only be set beside another that tells them apart alike.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no rows, or a row has no reference.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import Bleu

    >>> bleu = Bleu().compute(predictions=["the cat sat on a mat"], references=["the cat sat on the mat"])
    >>> round(bleu["bleu4"], 4)  # (5/6 · 3/5 · 2/4 · 1/3) ** ¼
    0.5373

    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="BLEU-4 over all rows.",
            citation="",
            inputs_description="predictions: a text a row. references: a text, or a list of texts, a row.",
            features=[
                Features({"predictions": Value("string"), "references": List(Value("string"))}),
                Features({"predictions": Value("string"), "references": Value("string")}),
            ],
        )

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        shared, there = [0] * MAX_ORDER, [0] * MAX_ORDER
        predicted_length = reference_length = 0
        for row, (prediction, targets) in enumerate(zip(predictions, references, strict=True)):
            if not targets and not isinstance(targets, str):
                raise ValueError(f"Row {row} has no reference text. Give it one, or drop the row.")
            words = WORDS.findall(prediction)
            goals = [WORDS.findall(target) for target in ([targets] if isinstance(targets, str) else targets)]
            predicted_length += len(words)
            reference_length += min((abs(len(goal) - len(words)), len(goal)) for goal in goals)[1]
            for order in range(1, MAX_ORDER + 1):
                found = _runs(words, order)
                most: Counter[tuple[str, ...]] = Counter()
                for goal in goals:
                    most |= _runs(goal, order)
                shared[order - 1] += (found & most).total()
                there[order - 1] += found.total()
        if not all(shared):
            return {"bleu4": 0.0}
        mean = sum(math.log(s / t) for s, t in zip(shared, there, strict=True)) / MAX_ORDER
        return {"bleu4": math.exp(mean + min(0.0, 1 - reference_length / predicted_length))}


def _runs(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    """How often each run of so many words occurs."""
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))
