"""Tests of exact match and token F1 against a simple implementation of SQuAD's definition."""

from __future__ import annotations

import random

import evaluate
import pytest

from hf_federated.tasks.metrics import ExactMatch, TokenF1


PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def squad_words(text: str) -> list[str]:
    """The words that SQuAD compares: lower case, no punctuation, no articles."""
    kept = "".join(character for character in text.lower() if character not in PUNCTUATION)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def squad_f1(answer: list[str], gold: list[str]) -> float:
    """2·precision·recall / (precision + recall) over words. If a side is empty: 1 if both are empty, else 0."""
    if not answer or not gold:
        return float(answer == gold)
    left, shared = list(gold), 0
    for word in answer:
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(answer), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def squad(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    """Both metrics: the mean over questions of the maximum over gold answers."""
    exact, f1 = [], []
    for prediction, golds in zip(predictions, references, strict=True):
        words = [squad_words(gold) for gold in golds if squad_words(gold)] or [[]]
        exact.append(max(float(squad_words(prediction) == gold) for gold in words))
        f1.append(max(squad_f1(squad_words(prediction), gold) for gold in words))
    return {"exact_match": sum(exact) / len(exact), "token_f1": sum(f1) / len(f1)}


def scores_of(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    return evaluate.combine([ExactMatch(), TokenF1()]).compute(predictions=predictions, references=references)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_published_definition(seed):
    generator = random.Random(seed)
    words = ["the", "A", "Paris", "paris,", "Zürich", "東京", "1889", "of", "of", "(an)", "-", "İzmir", "U.S."]

    def text() -> str:
        return " ".join(generator.choices(words, k=generator.randrange(5)))

    references = [[text() for _ in range(generator.randrange(4))] for _ in range(200)]
    predictions = [generator.choice(golds) if golds and generator.random() < 0.4 else text() for golds in references]
    assert scores_of(predictions, references) == pytest.approx(squad(predictions, references))


@pytest.mark.parametrize(
    ("prediction", "golds", "exact", "f1"),
    [
        ("The Seine.", ["seine"], 1, 1),
        ("Seine river", ["the Seine"], 0, 2 / 3),
        ("Paris", ["Rome", "in Paris", "Paris"], 1, 1),  # the maximum over gold answers, not the mean
        ("in the city of Paris", ["Paris", "city of Paris"], 0, 6 / 7),
        ("to be to", ["to be or not to be"], 0, 2 * 3 / 9),  # a repeated word counts as often as both texts have it
        ("", [], 1, 1),
        ("", [""], 1, 1),
        ("Paris", [], 0, 0),
        ("", ["Paris"], 0, 0),
        ("", ["", "Paris"], 0, 0),  # an empty gold answer is ignored if another gold answer is not empty
        ("the", [], 1, 1),
        ("ÉCOLE", ["école"], 1, 1),
        ("東京 都", ["東京"], 0, 2 / 3),
        ("„Paris“", ["Paris"], 0, 0),  # SQuAD removes ASCII punctuation only
    ],
)
def test_scores_of_single_answers(prediction, golds, exact, f1):
    assert scores_of([prediction], [golds]) == {"exact_match": exact, "token_f1": pytest.approx(f1)}


@pytest.mark.parametrize("metric_class", [ExactMatch, TokenF1])
def test_compute_without_inputs_raises(metric_class):
    with pytest.raises(ValueError, match="no inputs"):
        metric_class().compute(predictions=[], references=[])
