"""What the two metrics of extractive question answering share: how answers are compared.

Source: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), section 6.1, for the
normalisation and the maximum over gold answers; Rajpurkar et al., "Know What You Don't Know" (2018) for questions
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
    An answer in lower case, without ASCII punctuation, without English articles, with single spaces.

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


def mean_of_best(
    score: Callable[[str, str], float], predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
    """
    The mean over rows of the best score against a row's gold answers.

    Gold answers of which the normalisation leaves nothing do not count; a row without any other has no answer, and the
    right prediction is then empty.

    Args:
        score (`Callable[[str, str], float]`): Of a prediction and a gold answer, both normalised.
        predictions (`Sequence[str]`): An answer a row; an empty one says that there is none.
        references (`Sequence[Sequence[str]]`): The gold answers of each row.
    """
    best = []
    for prediction, golds in zip(predictions, references, strict=True):
        normalized = [gold for gold in map(normalize_answer, golds) if gold] or [""]
        answer = normalize_answer(prediction)
        best.append(max(score(answer, gold) for gold in normalized))
    return float(np.mean(best))
