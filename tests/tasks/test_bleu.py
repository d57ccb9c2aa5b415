"""Tests of BLEU-4 against values computed by hand and against nltk."""

from __future__ import annotations

import math
import random

import pytest
from nltk.translate.bleu_score import corpus_bleu

from hf_federated.tasks.metrics import Bleu
from hf_federated.tasks.metrics.bleu import WORDS


def bleu(predictions, references) -> float:
    return Bleu().compute(predictions=predictions, references=references)["bleu4"]


def test_ngrams_are_counted_over_all_examples():
    # The predictions have 7, 5, 3 and 1 n-grams of one to four words. 6, 4, 2 and 1 of them occur in the references.
    predictions, references = ["a b c d x", "e f"], ["a b c d e", "e f"]
    expected = (6 / 7 * 4 / 5 * 2 / 3 * 1 / 2) ** 0.25
    assert bleu(predictions, references) == pytest.approx(expected)


def test_ngram_count_is_clipped_to_count_in_reference():
    # 2 of the 5 occurrences of "the" count; Papineni et al. 2002, section 2.1.
    assert bleu(["the the the the the a b c d"], ["the cat the dog a b c d z"]) == pytest.approx(
        (6 / 9 * 3 / 8 * 2 / 7 * 1 / 6) ** 0.25
    )


def test_short_predictions_are_penalized():
    assert bleu(["a b c d"], ["a b c d e f"]) == pytest.approx(math.exp(1 - 6 / 4))
    assert bleu(["a b c d e f"], ["a b c d e f"]) == 1


def test_several_references_match_ngrams_and_closest_length():
    assert bleu(["a b c d"], [["a b c", "a b c d e f g", "x b c d"]]) == pytest.approx((1 * 1 * 1 * 1) ** 0.25)


def test_score_is_zero_without_shared_four_gram():
    assert bleu(["a b c x d e f"], ["a b c y d e f"]) == 0
    assert bleu([""], ["a b c d"]) == 0


def test_punctuation_marks_are_words_and_case_matters():
    assert bleu(["Is it, now?"], ["Is it , now ?"]) == 1
    assert bleu(["is it, now?"], ["Is it, now?"]) < 1


def test_score_equals_nltk():
    draw = random.Random(0)
    lines = [[" ".join(draw.choices("abcd", k=draw.randrange(4, 12))) for _ in range(30)] for _ in range(3)]
    predictions, references = lines[0], [list(pair) for pair in zip(lines[1], lines[2], strict=True)]
    expected = corpus_bleu(
        [[WORDS.findall(text) for text in pair] for pair in references], [WORDS.findall(text) for text in predictions]
    )
    assert bleu(predictions, references) == pytest.approx(expected)


def test_example_without_reference_raises():
    with pytest.raises(ValueError, match="Row 1 has no reference text"):
        bleu(["a", "b"], [["a"], []])
