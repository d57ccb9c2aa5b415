"""Corpus-level BLEU-4 of generated texts, without a download."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from .base import TEXT_FEATURES, LocalMetric, reference_texts


MAX_ORDER = 4
# Words and single punctuation marks.
WORDS = re.compile(r"\w+|[^\w\s]")


class Bleu(LocalMetric):
    """
    Corpus-level BLEU with n-grams of one to four words.

    BLEU = BP · exp(¼ Σ_{n=1..4} ln p_n). The precision p_n is the fraction of n-grams in the predictions that occur in
    a reference of the same example. The count of an n-gram is clipped to its highest count in a single reference. The
    brevity penalty is BP = min(1, exp(1 − r/c)), where c is the number of words in all predictions. The reference
    length r is the sum over examples of the reference length closest to the prediction length; ties use the shorter
    reference. Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation" (2002),
    section 2. There is no smoothing, so BLEU is 0 if no 4-gram matches.

    Tokens are sequences of letters and digits, and single punctuation marks. Upper and lower case differ. Scores
    depend on the tokenization, so compare only scores that use the same tokenization.

    Args:
        kwargs (*optional*): As in [`~hf_federated.tasks.metrics.base.LocalMetric`].

    Raises:
        ValueError: From `compute`, if there are no inputs or an example has no reference.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics import Bleu

    >>> bleu = Bleu().compute(predictions=["the cat sat on a mat"], references=["the cat sat on the mat"])
    >>> round(bleu["bleu4"], 4)  # (5/6 · 3/5 · 2/4 · 1/3) ** ¼
    0.5373

    ```
    """

    summary = "Corpus-level BLEU-4."
    inputs = "predictions: one text per example. references: one text per example, or a list."
    features_of_inputs = TEXT_FEATURES

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        num_matches, num_ngrams = [0] * MAX_ORDER, [0] * MAX_ORDER
        predicted_length = reference_length = 0
        for row, (prediction, targets) in enumerate(zip(predictions, references, strict=True)):
            words = WORDS.findall(prediction)
            target_words = [WORDS.findall(target) for target in reference_texts(targets, row)]
            predicted_length += len(words)
            reference_length += min((abs(len(target) - len(words)), len(target)) for target in target_words)[1]
            for order in range(1, MAX_ORDER + 1):
                ngrams = _count_ngrams(words, order)
                max_counts: Counter[tuple[str, ...]] = Counter()
                for target in target_words:
                    max_counts |= _count_ngrams(target, order)
                num_matches[order - 1] += (ngrams & max_counts).total()
                num_ngrams[order - 1] += ngrams.total()
        if not all(num_matches):
            return {"bleu4": 0.0}
        mean = sum(math.log(m / n) for m, n in zip(num_matches, num_ngrams, strict=True)) / MAX_ORDER
        return {"bleu4": math.exp(mean + min(0.0, 1 - reference_length / predicted_length))}


def _count_ngrams(words: list[str], order: int) -> Counter[tuple[str, ...]]:
    """Count the n-grams with `order` words."""
    return Counter(tuple(words[start : start + order]) for start in range(len(words) - order + 1))
