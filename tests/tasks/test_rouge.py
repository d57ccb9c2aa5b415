"""Tests of ROUGE against rouge-score and against a simple count."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from rouge_score.rouge_scorer import RougeScorer

from hf_federated.tasks.metrics import Rouge


TYPES = ["rouge1", "rouge2", "rougeL"]
WORDS = ["the", "cats", "cat", "running", "runs", "naïve", "Zürich", "7", "", "-", "snow", "snowy"]


def draw(seed: int, num_rows: int = 40) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randrange(9))) for _ in range(num_rows)]


def common_subsequence(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence, computed with its recursive definition."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, word in enumerate(a):
        for j, other in enumerate(b):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if word == other else max(lengths[i][j + 1], lengths[i + 1][j])
    return lengths[-1][-1]


@pytest.mark.parametrize("use_stemmer", [False, True])
def test_scores_equal_rouge_score(use_stemmer):
    predictions, references = draw(0), draw(1)
    scorer = RougeScorer(TYPES, use_stemmer=use_stemmer)
    each = [scorer.score(target, prediction) for target, prediction in zip(references, predictions, strict=True)]
    scores = Rouge(use_stemmer=use_stemmer).compute(predictions=predictions, references=references)
    assert scores == pytest.approx({name: sum(row[name].fmeasure for row in each) / len(each) for name in TYPES})


def test_scores_equal_published_definition():
    prediction, reference = "a b c d a", "a c b a e f"
    a, b = prediction.split(), reference.split()
    pairs = [Counter(zip(words, words[1:], strict=False)) for words in (a, b)]
    assert Rouge().compute(predictions=[prediction], references=[reference]) == pytest.approx(
        {
            "rouge1": 2 * (Counter(a) & Counter(b)).total() / 11,
            "rouge2": 2 * (pairs[0] & pairs[1]).total() / 9,
            "rougeL": 2 * common_subsequence(a, b) / 11,
        }
    )


def test_stemmer_removes_suffixes():
    rows = {"predictions": ["walking dogs"], "references": ["walked dog"]}
    assert Rouge().compute(**rows)["rouge1"] == 0.0
    assert Rouge(use_stemmer=True).compute(**rows)["rouge1"] == 1.0


def test_best_reference_counts():
    each = [Rouge().compute(predictions=["snow falls"], references=[text]) for text in ("snow", "rain falls hard")]
    both = Rouge().compute(predictions=["snow falls"], references=[["snow", "rain falls hard"]])
    assert both == {name: max(scores[name] for scores in each) for name in TYPES}


@pytest.mark.parametrize("pair", [("", ""), ("", "snow"), ("snow", ""), ("снег", "снег")])
def test_texts_without_words_score_zero(pair):
    assert Rouge().compute(predictions=[pair[0]], references=[pair[1]]) == dict.fromkeys(TYPES, 0.0)


def test_error_names_row_without_references():
    with pytest.raises(ValueError, match="Row 1 has no reference"):
        Rouge().compute(predictions=["a", "b"], references=[["a"], []])


def test_compute_without_inputs_raises():
    with pytest.raises(ValueError, match="no inputs"):
        Rouge().compute(predictions=[], references=[])
