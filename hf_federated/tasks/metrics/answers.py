"""Answer comparison of the extractive question answering metrics.

Sources: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), section 6.1, for the
normalization and the maximum over gold answers; Rajpurkar et al., "Know What You Don't Know" (2018), for questions
without an answer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence

import numpy as np
from datasets import Features, List, Value


FEATURES = Features({"predictions": Value("string"), "references": List(Value("string"))})

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def normalize_answer(text: str) -> str:
    """
    Normalize an answer: lower case, no ASCII punctuation, no English articles, single spaces.

    Args:
        text (`str`): The answer.

    Example:

    ```python
    >>> from hf_federated.tasks.metrics.answers import normalize_answer

    >>> normalize_answer("The  Eiffel-Tower, in an hour!")
    'eiffeltower in hour'

    ```
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def mean_best_score(
    score: Callable[[str, str], float], predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
    """
    Return the mean over examples of the best score against the gold answers.

    Gold answers that are empty after normalization are ignored. If no gold answer remains, the question has no answer,
    and the correct prediction is empty.

    Args:
        score (`Callable[[str, str], float]`): Scores a prediction against a gold answer, both normalized.
        predictions (`Sequence[str]`): One answer per example. An empty answer predicts that there is no answer.
        references (`Sequence[Sequence[str]]`): The gold answers of each example.
    """
    best = []
    for prediction, golds in zip(predictions, references, strict=True):
        normalized = [gold for gold in map(normalize_answer, golds) if gold] or [""]
        answer = normalize_answer(prediction)
        best.append(max(score(answer, gold) for gold in normalized))
    return float(np.mean(best))
