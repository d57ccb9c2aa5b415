"""Tests of entity F1 against seqeval and against a simple count."""

from __future__ import annotations

import random
import warnings

import pytest
import seqeval.metrics
import seqeval.scheme

from hf_federated.tasks.metrics import SpanF1


def draw(seed: int, num_rows: int = 50) -> tuple[list[list[str]], list[list[str]]]:
    """Valid IOB2 examples of 0 to 12 tags, and predictions that differ in some tags."""
    generator = random.Random(seed)
    references, predictions = [], []
    for _ in range(num_rows):
        tags: list[str] = []
        for _ in range(generator.randrange(5)):
            kind = generator.choice(["PER", "LOC", "Ö-Ä"])
            tags += [f"B-{kind}", *[f"I-{kind}"] * generator.randrange(3)] if generator.random() < 0.6 else ["O"]
        references.append(tags)
        predictions.append([generator.choice(["O", "B-PER", tag, tag, tag]) for tag in tags])
    return predictions, references


def spans(tags: list[str]) -> set[tuple[str, int, int]]:
    """The entities of strict IOB2: a B tag and the following I tags of the same type."""
    found = set()
    for begin, tag in enumerate(tags):
        if tag.startswith("B-"):
            end = begin + 1
            while end < len(tags) and tags[end] == f"I-{tag[2:]}":
                end += 1
            found.add((tag[2:], begin, end))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_scores_equal_seqeval(seed):
    predictions, references = draw(seed)
    assert SpanF1().compute(predictions=predictions, references=references) == {
        "span_precision": pytest.approx(seqeval.metrics.precision_score(references, predictions)),
        "span_recall": pytest.approx(seqeval.metrics.recall_score(references, predictions)),
        "span_f1": pytest.approx(seqeval.metrics.f1_score(references, predictions)),
    }


@pytest.mark.parametrize("seed", range(3))
def test_strict_iob2_equals_simple_count(seed):
    predictions, references = draw(seed)
    pairs = [(spans(a), spans(b)) for a, b in zip(predictions, references, strict=True)]
    right = sum(len(a & b) for a, b in pairs)
    predicted, true = sum(len(a) for a, _ in pairs), sum(len(b) for _, b in pairs)
    scores = SpanF1(scheme="IOB2").compute(predictions=predictions, references=references)
    assert scores["span_precision"] == pytest.approx(right / predicted)
    assert scores["span_recall"] == pytest.approx(right / true)
    assert scores["span_f1"] == pytest.approx(2 * right / (predicted + true))


def test_entity_is_correct_only_with_type_start_and_end():
    references = [["B-PER", "I-PER", "O"], ["B-LOC", "I-LOC", "O"], ["O", "B-LOC"], ["B-PER"]]
    predictions = [["B-PER", "I-PER", "O"], ["B-LOC", "O", "O"], ["O", "B-PER"], ["O"]]
    scores = SpanF1().compute(predictions=predictions, references=references)
    assert scores == {"span_precision": 1 / 3, "span_recall": 1 / 4, "span_f1": pytest.approx(2 / 7)}


def test_inside_tag_without_begin_counts_unless_scheme_is_strict():
    rows = {"predictions": [["O", "I-PER"]], "references": [["O", "B-PER"]]}
    assert SpanF1().compute(**rows)["span_f1"] == 1.0
    assert SpanF1(scheme="IOB2").compute(**rows)["span_f1"] == 0.0


@pytest.mark.parametrize("scheme", [None, "IOB2"])
@pytest.mark.parametrize("rows", [[["O", "O"], []], [["O"]]])
def test_examples_without_entities_score_zero_without_warnings(rows, scheme):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = SpanF1(scheme=scheme).compute(predictions=rows, references=rows)
    assert scores == {"span_precision": 0.0, "span_recall": 0.0, "span_f1": 0.0}


def test_bilou_tags_require_bilou_scheme():
    rows = [["B-PER", "L-PER", "U-LOC", "O"]]
    with pytest.raises(ValueError, match="Row 0 of the predictions has the tag 'L-PER'|the tag 'U-LOC'"):
        SpanF1().compute(predictions=rows, references=rows)
    assert SpanF1(scheme="BILOU").compute(predictions=rows, references=rows)["span_f1"] == 1.0


def test_error_names_invalid_row():
    with pytest.raises(ValueError, match="Row 1 has 1 predicted and 2 true tags"):
        SpanF1().compute(predictions=[["O"], ["O"]], references=[["O"], ["O", "O"]])
    with pytest.raises(ValueError, match="Row 1 of the references has the tag 'NOUN'.*use Accuracy"):
        SpanF1().compute(predictions=[["O"], ["O"]], references=[["O"], ["NOUN"]])


def test_unknown_scheme_raises():
    with pytest.raises(ValueError, match="'iob2'; allowed are None and 'IOB1'"):
        SpanF1(scheme="iob2")
