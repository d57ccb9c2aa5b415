"""Tests that `find_empty` finds exactly the examples that `encode` rejects."""

from __future__ import annotations

import pytest

from hf_federated.tasks import (
    LanguageModeling,
    QuestionAnswering,
    Seq2Seq,
    SequenceTagging,
    Summarization,
    SuperGlueClassification,
    SuperGlueCloze,
    TextClassification,
)


ANSWER = {"text": "rome", "answer_start": 3}
# A task, the columns of a valid example, and changes to the columns with the expected result of `find_empty`.
CASES = {
    "classification": (
        TextClassification(["a", "b"]),
        {"text": "in rome", "label": 0},
        [({}, False), ({"text": " \n"}, True), ({"text": None}, True)],
    ),
    "pair": (
        TextClassification(["a", "b"], text_column=("text", "other")),
        {"text": "in rome", "other": "film", "label": 0},
        [({}, False), ({"other": ""}, True)],
    ),
    "tagging": (
        SequenceTagging(["O", "B-LOC"]),
        {"tokens": ["in", "rome"], "ner_tags": [0, 1]},
        [
            ({}, False),
            ({"tokens": ["", "rome"]}, False),
            ({"tokens": [], "ner_tags": []}, True),
            ({"tokens": ["", " "]}, True),
            ({"tokens": None, "ner_tags": None}, True),
        ],
    ),
    "answers": (
        QuestionAnswering(max_length=16, stride=2),
        {"id": "1", "question": "film", "context": "in rome", "answers": [ANSWER]},
        [({}, False), ({"question": ""}, True), ({"context": None, "answers": []}, True), ({"answers": []}, True)],
    ),
    "no answer": (
        QuestionAnswering(max_length=16, stride=2, no_answer=True),
        {"id": "1", "question": "film", "context": "in rome", "answers": []},
        [({}, False), ({"answers": {"text": [], "answer_start": []}}, False), ({"question": " "}, True)],
    ),
    "seq2seq": (
        Seq2Seq(),
        {"source": "in rome", "target": ["film"]},
        [({}, False), ({"target": "film"}, False), ({"target": ["film", ""]}, True), ({"target": []}, True)],
    ),
    "superglue": (
        SuperGlueClassification(),
        {"task": "rte", "source": "in rome", "target": "Entailment"},
        [({}, False), ({"source": ""}, True), ({"target": None}, True)],
    ),
    "summary": (
        Summarization(),
        {"source": "in rome", "target": ["film"]},
        [
            ({}, False),
            ({"source": " "}, True),
            ({"target": ["film", ""]}, True),
            ({"target": None}, True),
            ({"target": float("nan")}, True),  # missing value in a table
        ],
    ),
    "cloze": (
        SuperGlueCloze(),
        {
            "id": "1",
            "task": "rte",
            "source": "in rome [M]",
            "mask_start": 8,
            "passage_start": 0,
            "passage_end": 0,
            "candidates": ["warm", "cold"],
            "label": 0,
        },
        [({}, False), ({"source": ""}, True), ({"candidates": []}, True), ({"candidates": ["warm", " "]}, True)],
    ),
    "language": (LanguageModeling(), {"text": "in rome"}, [({}, False), ({"text": ""}, True)]),
}


@pytest.mark.parametrize(("task", "row", "changes"), CASES.values(), ids=CASES)
def test_find_empty_finds_exactly_rejected_rows(tokenizer, task, row, changes):
    for change, empty in changes:
        batch = {name: [value] for name, value in {**row, **change}.items()}
        assert task.find_empty(batch) == [empty]
        if empty:
            with pytest.raises(ValueError, match="Row 7"):
                task.encode(batch, tokenizer, [7])
        else:
            assert len(task.encode(batch, tokenizer, [7])["input_ids"]) == 1


def test_error_names_missing_column():
    with pytest.raises(ValueError, match="There is no column 'text'"):
        LanguageModeling().find_empty({"words": ["a"]})
