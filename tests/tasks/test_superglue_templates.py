"""Tests of the texts and label names that raw SuperGLUE rows become (FedDRS, appendix A.2)."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from datasets import Dataset
from measure import milliseconds_per_example
from superglue_paper import PRINTED
from superglue_raw import FILES, STORY, files, hub, spans

from hf_federated.tasks import superglue_rows
from hf_federated.tasks.superglue import LABEL_NAMES, LABELS


BAKERY = "Miras wellknown bakery the Oven opened in Lund Sweden in 1999 It closed"
NEWS = "Ada Lund met Bo Ek in Malmo Bo Eks dog ran off Ada Lund found it"
# By task: the sources and targets of all rows of `superglue_raw.py`.
GOLDEN: dict[str, list[tuple[str, str]]] = {
    "boolq": [
        (f"boolq question: is lunds bakery still open. passage: {BAKERY}", "No"),
        (f"boolq question: did the bakery close. passage: {BAKERY}", "Yes"),
    ],
    "cb": [
        ("cb hypothesis: it is cold. premise: Its cold So cold", "Entailment"),
        ("cb hypothesis: it is warm. premise: Its cold", "Contradiction"),
        ("cb hypothesis: it is cold. premise: Is it cold", "Neutral"),
    ],
    "copa": [
        ("copa choice1: It fell. choice2: Its red. premise: The cup broke. question: cause", "Choice_one"),
        ("copa choice1: He sang. choice2: He got wet. premise: It rained. question: effect", "Choice_two"),
    ],
    "multirc": [
        (f"multirc question: Wheres the wellknown bakery? answer: Lund Sweden. paragraph: {BAKERY}", "True"),
        (f"multirc question: Wheres the wellknown bakery? answer: Oslo. paragraph: {BAKERY}", "False"),
        (f"multirc question: Wheres the wellknown bakery? answer: . paragraph: {BAKERY}", "False"),
        (f"multirc question: Name the year it opened. answer: 1999. paragraph: {BAKERY}", "True"),
        (f"multirc question: Name the year it opened. answer: 2001. paragraph: {BAKERY}", "False"),
    ],
    "record": [
        (f"record answer: Bo Ek. query: The dog of @placeholders ran off. passage: {NEWS}", "Correct"),
        (f"record answer: Ada Lund. query: The dog of @placeholders ran off. passage: {NEWS}", "Wrong"),
        (f"record answer: Malmo. query: The dog of @placeholders ran off. passage: {NEWS}", "Wrong"),
        (f"record answer: Bo Ek. query: It was found by @placeholder. passage: {NEWS}", "Wrong"),
        (f"record answer: Ada Lund. query: It was found by @placeholder. passage: {NEWS}", "Correct"),
        (f"record answer: Malmo. query: It was found by @placeholder. passage: {NEWS}", "Wrong"),
    ],
    "rte": [
        ("rte hypothesis: It snowed. premise: Snow fell in Rome", "Entailment"),
        ("rte hypothesis: Rome is welloff. premise: Snow fell in Rome", "Not_entailment"),
    ],
    "wic": [
        ("wic word: bank. sentence1: At the bank. sentence2: The rivers bank", "Mismatch"),
        ("wic word: run. sentence1: They run. sentence2: I run home", "Match"),
    ],
    "wsc": [
        ("wsc: Anns boss saw Eve and * she * being shy left", "Difference"),
        ("wsc: Anns boss saw Eve and * she * being shy left", "Same"),
    ],
}


@pytest.mark.parametrize("task", LABELS)
def test_templates_equal_examples_of_paper(task):
    raw, printed = PRINTED[task]
    rows = superglue_rows(task, Dataset.from_list([raw]))
    assert list(zip(rows["source"], rows["target"], strict=True)) == printed


@pytest.mark.parametrize("task", LABELS)
@pytest.mark.parametrize("layout", [files, hub])
def test_raw_rows_give_expected_texts_and_labels(task, layout):
    rows = superglue_rows(task, layout(task))
    assert list(zip(rows["source"], rows["target"], strict=True)) == GOLDEN[task]
    assert set(rows["task"]) == {task}
    assert rows.column_names == ["task", "source", "target", "question", "answer", "answers"]


@pytest.mark.parametrize("task", LABELS)
def test_both_layouts_give_same_rows(task):
    assert superglue_rows(task, files(task))[:] == superglue_rows(task, hub(task))[:]


def test_all_tasks_have_same_features():
    assert len({str(superglue_rows(task, files(task)).features) for task in LABELS}) == 1


def test_question_column_identifies_question():
    rows = superglue_rows("multirc", files("multirc"))
    assert rows["question"][:] == ["multirc-7-3"] * 3 + ["multirc-7-4"] * 2
    assert rows["answer"][:] == ["Lund, Sweden", "Oslo", "", "1999", "2001"]
    rows = superglue_rows("record", files("record"))
    assert rows["question"][:] == ["record-5-8"] * 3 + ["record-5-9"] * 3
    # The raw list contains Bo Ek twice.
    assert rows["answer"][:] == ["Bo Ek", "Ada Lund", "Malmo"] * 2
    assert rows["answers"][:] == [["Bo Ek"]] * 3 + [["Ada Lund"]] * 3
    single = [superglue_rows(task, files(task)) for task in ("boolq", "cb", "copa", "rte", "wic", "wsc")]
    assert all(len(set(rows["question"])) == len(rows) for rows in single)


def test_label_names_are_unique_within_task():
    for task, names in LABELS.items():
        assert len(set(names.values())) == len(names), task
    # CB and RTE share the label Entailment.
    assert len(LABEL_NAMES) == len(set(LABEL_NAMES)) == sum(map(len, LABELS.values())) - 1 == 16


def test_labels_are_converted_by_name_independent_of_numbers():
    rows = hub("cb")
    original = rows.cast_column("label", rows.features["label"])  # the same names
    swapped = Dataset.from_dict({**rows.to_dict(), "label": ["entailment", "contradiction", "neutral"]})
    swapped = swapped.class_encode_column("label")  # sorted, so that contradiction has the number 0
    assert swapped["label"][:] != original["label"][:]
    assert superglue_rows("cb", swapped)[:] == superglue_rows("cb", original)[:]


def test_mark_span1_marks_noun_of_wsc_row():
    rows = superglue_rows("wsc", files("wsc"), mark_span1=True)
    assert rows["source"][:] == [
        "wsc: * Anns * boss saw Eve and * she * being shy left",
        "wsc: Anns boss saw * Eve * and * she * being shy left",
    ]


def test_wsc_span_with_wrong_index_is_found_at_closest_match():
    row = {"text": "It is safe , he said , use it now , it is", "span1_text": "safe", "span1_index": 2, "label": 1}
    rows = Dataset.from_list([{**row, "span2_text": "it", "span2_index": 7}])
    assert superglue_rows("wsc", rows)["source"][:] == ["wsc: It is safe he said use * it * now it is"]


# ---- Errors


def changed(task: str, **columns: Any) -> list[dict[str, Any]]:
    """The rows of a task's file, with changed values in the last row."""
    rows = copy.deepcopy(FILES[task])
    rows[-1].update(columns)
    return rows


def without(task: str, column: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != column} for row in FILES[task]]


ANSWERED = FILES["record"][0]["qas"][0]
STRANGER = [{**ANSWERED, "answers": [{"start": 0, "end": 2, "text": "Ada"}]}]
BAD: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "no column": (
        "boolq",
        without("boolq", "passage"),
        "Row 0 of 'boolq' has no 'passage'; it has 'question', 'label'",
    ),
    "no text": ("cb", changed("cb", premise=" "), "Row 2 of 'cb' has ' ' instead of a text in 'premise'"),
    "no label": ("rte", without("rte", "label"), "Row 0 of 'rte' has no 'label'; it has 'premise', 'hypothesis'"),
    "unpublished label": ("copa", changed("copa", label=-1), "Row 1 of 'copa' has no label. Remove rows without"),
    "label of another task": (
        "cb",
        changed("cb", label="Yes"),
        "Row 2 of 'cb' has the label 'Yes'; allowed are 'entailment', 'contradiction', 'neutral', or their numbers 0",
    ),
    "number beyond": (
        "copa",
        changed("copa", label=2),
        "Row 1 of 'copa' has the label 2; allowed are 'choice1', 'choi",
    ),
    "answer that is no entity": (
        "record",
        changed("record", qas=STRANGER),
        "Row 0 of 'record' has the answer 'Ada', which is not one of the entities of its text: 'Bo Ek', 'Ada",
    ),
    "entity outside": (
        "record",
        changed("record", passage={"text": STORY, "entities": [*spans(STORY, "Malmo"), {"start": 900, "end": 905}]}),
        "Row 0 of 'record' has the entity {'start': 900, 'end': 905}, which is not in its text of 88 characters",
    ),
    "query without a gap": (
        "record",
        changed("record", qas=[{**ANSWERED, "query": "Whose dog?"}]),
        "Row 0 of 'record' has a query without '@placeholder': 'Whose dog?'",
    ),
    "span outside": (
        "wsc",
        changed("wsc", target={**FILES["wsc"][0]["target"], "span2_text": "they"}),
        "Row 1 of 'wsc' has span2_text 'they', which is not in its text: \"Ann's boss",
    ),
    "answer without a text": (
        "multirc",
        changed(
            "multirc", passage={"text": "a", "questions": [{"question": "b?", "idx": 0, "answers": [{"text": None}]}]}
        ),
        "Row 0 of 'multirc' has None instead of a text in 'text'",
    ),
}


@pytest.mark.parametrize(("task", "rows", "message"), BAD.values(), ids=BAD)
def test_error_names_invalid_row(task, rows, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        superglue_rows(task, Dataset.from_list(rows))


def test_unknown_task_raises_with_known_tasks():
    with pytest.raises(ValueError, match="'cola' is not a SuperGLUE task; the tasks are 'boolq', 'cb', .*'wsc'"):
        superglue_rows("cola", files("cb"))


def test_converting_takes_less_than_a_millisecond_per_example():
    raw = copy.deepcopy(FILES["multirc"][0])
    raw["passage"]["text"] *= 20  # 1700 characters
    data = Dataset.from_list([raw] * 100)
    assert milliseconds_per_example(lambda: superglue_rows("multirc", data), 500) < 1
