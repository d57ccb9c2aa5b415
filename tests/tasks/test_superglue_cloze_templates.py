"""Tests of SuperGLUE's cloze questions: templates of FL-GLM's table 5, candidates, and errors that name the row."""

from __future__ import annotations

import copy
import logging

import pytest
from datasets import Dataset
from measure import milliseconds_per_example
from superglue_raw import FILES, PASSAGE, STORY, files, hub

from hf_federated.tasks import superglue_cloze_rows, superglue_rows
from hf_federated.tasks.superglue import LABELS


STORY_AS_READ = STORY.replace("\n@highlight\n", "\n- ")
STRIPPED = PASSAGE.removesuffix(".")
# By task: text, candidates, label and label name of the first row.
FIRST = {
    "boolq": (f"{STRIPPED}. Question: is lund's bakery still open? Answer: [M].", ["no", "yes"], 0, "No"),
    "cb": ('"it is cold"? [M], "It\'s cold. So cold!"', ["yes", "no", "maybe"], 0, "Entailment"),
    "copa": (
        '"it fell" or "it\'s red"? The cup broke because [M].',
        ["it fell", "it's red"],
        0,
        "Choice_one",
    ),
    "multirc": (
        f"{STRIPPED}. Question: Where's the well-known bakery? Is it Lund, Sweden? [M].",
        ["no", "yes"],
        1,
        "True",
    ),
    "record": (
        f"{STORY_AS_READ}\nThe dog of [M]'s ran off.",
        ["Bo Ek", "Ada Lund", "Malmo"],
        0,
        "Correct",
    ),
    "rte": ('"It snowed"? [M] "Snow fell in Rome."', ["yes", "no"], 0, "Entailment"),
    "wic": ('"At the bank?" / "The river\'s bank." Similar sense of bank? [M].', ["no", "yes"], 0, "Mismatch"),
    "wsc": (
        "Ann's boss saw Eve , and *she*, being shy, left. The pronoun '*she*' refers to [M].",
        ["Ann", "Eve"],
        -1,
        "Difference",
    ),
}


@pytest.mark.parametrize("layout", [files, hub])
@pytest.mark.parametrize("task", LABELS)
def test_first_row_uses_template_of_paper(task, layout):
    row = superglue_cloze_rows(task, layout(task))[0]
    assert (row["source"], row["candidates"], row["label"], row["target"]) == FIRST[task]
    assert row["task"] == task


@pytest.mark.parametrize("task", LABELS)
def test_both_layouts_give_same_questions(task):
    from_files, from_hub = superglue_cloze_rows(task, files(task)), superglue_cloze_rows(task, hub(task))
    assert from_files.remove_columns("id").to_list() == from_hub.remove_columns("id").to_list()
    assert len(set(from_files["id"])) == len(from_files)
    # The other templates have one row per ReCoRD candidate, but the same questions.
    questions = superglue_rows(task, files(task))["question"]
    assert list(dict.fromkeys(from_files["question"])) == list(dict.fromkeys(questions))


@pytest.mark.parametrize("task", LABELS)
def test_columns_locate_blank_and_truncatable_part(task):
    for row in superglue_cloze_rows(task, files(task)):
        assert row["source"][row["mask_start"] :].startswith("[M]")
        passage = row["source"][row["passage_start"] : row["passage_end"]]
        expected = {"boolq": STRIPPED, "multirc": STRIPPED, "record": STORY_AS_READ}
        if task in ("cb", "rte"):
            assert passage in {raw["premise"] for raw in FILES[task]} and f'"{passage}"' in row["source"]
        else:
            assert passage == expected.get(task, "")


def test_copa_asks_for_effects_and_causes_with_different_words():
    assert [row["source"].split("? ")[1] for row in superglue_cloze_rows("copa", files("copa"))] == [
        "The cup broke because [M].",
        "It rained, so [M].",
    ]


def test_blank_mark_in_raw_text_is_ignored():
    raw = [{"question": "what is [M]", "passage": "It [M] is.", "label": True}]
    row = superglue_cloze_rows("boolq", Dataset.from_list(raw))[0]
    assert row["source"][: row["mask_start"]] == "It [M] is. Question: what is [M]? Answer: "


def test_wsc_candidates_are_nouns_in_question():
    rows = superglue_cloze_rows("wsc", files("wsc"))
    # The noun of the row is the first candidate. If the label is false, the correct noun is unknown.
    assert rows["candidates"][:] == [["Ann", "Eve"], ["Eve", "Ann"]]
    assert rows["label"][:] == [-1, 0]
    assert superglue_cloze_rows("wsc", files("wsc"), answered_only=True)["candidates"][:] == [["Eve", "Ann"]]


def test_wsc_rows_can_have_candidates_column(caplog):
    single = files("wsc").select([0])
    with caplog.at_level(logging.WARNING):
        assert superglue_cloze_rows("wsc", single)["candidates"][:] == [["Ann"]]
    assert "1 of 1 rows of 'wsc' have only one candidate" in caplog.text
    caplog.clear()
    more = single.add_column("candidates", [["boss", "Ann", " "]])
    assert superglue_cloze_rows("wsc", more)["candidates"][:] == [["Ann", "boss"]]
    as_objects = single.add_column("candidates", [[{"text": "boss"}]])
    assert superglue_cloze_rows("wsc", as_objects)["candidates"][:] == [["Ann", "boss"]]
    assert caplog.text == ""


def test_answered_only_removes_queries_without_answers():
    raw = copy.deepcopy(FILES["record"])
    raw[0]["qas"][1]["answers"] = []
    raw[0]["qas"].append({**raw[0]["qas"][0], "idx": 10})
    rows = Dataset.from_list(raw)
    assert superglue_cloze_rows("record", rows)["label"][:] == [0, -1, 0]
    assert superglue_cloze_rows("record", rows, answered_only=True)["label"][:] == [0, 0]


@pytest.mark.parametrize(
    ("task", "changed", "message"),
    [
        ("boolq", {"passage": " "}, "Row 1 of 'boolq' has ' ' instead of a text in 'passage'"),
        ("boolq", {"label": None}, "Row 1 of 'boolq' has no label"),
        ("cb", {"label": "true"}, "Row 1 of 'cb' has the label 'true'; allowed are 'entailment'"),
        ("copa", {"question": "why"}, "Row 1 of 'copa' has the question 'why'; allowed are 'effect', 'cause'"),
        ("copa", {"choice2": ""}, "Row 1 of 'copa' has '' instead of a text in 'choice2'"),
        ("copa", {"choice2": "..."}, "Row 1 of 'copa' has nothing but punctuation in 'choice2'"),
        ("wsc", {"text": "He left."}, "Row 1 of 'wsc' has span2_text 'she', which is not in its text"),
    ],
)
def test_error_names_invalid_row(task, changed, message):
    raw = [FILES[task][0], {**FILES[task][1], **changed}]
    with pytest.raises(ValueError, match=message):
        superglue_cloze_rows(task, Dataset.from_list(raw))


def test_missing_column_and_unknown_task_raise():
    with pytest.raises(ValueError, match="Row 0 of 'rte' has no 'hypothesis'; it has 'premise', 'label'"):
        superglue_cloze_rows("rte", files("rte").remove_columns("hypothesis"))
    with pytest.raises(ValueError, match="'qnli' is not a SuperGLUE task; the tasks are 'boolq'"):
        superglue_cloze_rows("qnli", files("rte"))


def test_converting_takes_less_than_a_millisecond_per_example():
    rows = Dataset.from_list([{**FILES["multirc"][0], "idx": number} for number in range(100)])
    assert milliseconds_per_example(lambda: superglue_cloze_rows("multirc", rows), 500) < 1
