"""SuperGLUE's raw rows as cloze questions: the wording of FL-GLM's table 5, candidates, errors that name the row."""

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
UNENDED = PASSAGE.removesuffix(".")
# Of each task the first row's text, candidates, label and the name of the label.
FIRST = {
    "boolq": (f"{UNENDED}. Question: is lund's bakery still open? Answer: [M].", ["no", "yes"], 0, "No"),
    "cb": ('"it is cold"? [M], "It\'s cold. So cold!"', ["yes", "no", "maybe"], 0, "Entailment"),
    "copa": (
        '"it fell" or "it\'s red"? The cup broke because [M].',
        ["it fell", "it's red"],
        0,
        "Choice_one",
    ),
    "multirc": (
        f"{UNENDED}. Question: Where's the well-known bakery? Is it Lund, Sweden? [M].",
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
def test_a_row_reads_as_the_paper_words_it(task, layout):
    row = superglue_cloze_rows(task, layout(task))[0]
    assert (row["source"], row["candidates"], row["label"], row["target"]) == FIRST[task]
    assert row["task"] == task


@pytest.mark.parametrize("task", LABELS)
def test_both_layouts_are_the_same_questions(task):
    from_files, from_hub = superglue_cloze_rows(task, files(task)), superglue_cloze_rows(task, hub(task))
    assert from_files.remove_columns("id").to_list() == from_hub.remove_columns("id").to_list()
    assert len(set(from_files["id"])) == len(from_files)
    # Rows of one question are the same as with the other templates, which have a row for each candidate of ReCoRD.
    asked = superglue_rows(task, files(task))["question"]
    assert list(dict.fromkeys(from_files["question"])) == list(dict.fromkeys(asked))


@pytest.mark.parametrize("task", LABELS)
def test_places_of_blank_and_passage_are_in_the_text(task):
    for row in superglue_cloze_rows(task, files(task)):
        assert row["source"][row["mask_start"] :].startswith("[M]")
        passage = row["source"][row["passage_start"] : row["passage_end"]]
        expected = {"boolq": UNENDED, "multirc": UNENDED, "record": STORY_AS_READ}
        if task in ("cb", "rte"):
            assert passage in {raw["premise"] for raw in FILES[task]} and f'"{passage}"' in row["source"]
        else:
            assert passage == expected.get(task, "")


def test_effects_and_causes_are_asked_for_in_words_of_their_own():
    assert [row["source"].split("? ")[1] for row in superglue_cloze_rows("copa", files("copa"))] == [
        "The cup broke because [M].",
        "It rained, so [M].",
    ]


def test_a_blank_in_a_raw_text_is_no_blank():
    raw = [{"question": "what is [M]", "passage": "It [M] is.", "label": True}]
    row = superglue_cloze_rows("boolq", Dataset.from_list(raw))[0]
    assert row["source"][: row["mask_start"]] == "It [M] is. Question: what is [M]? Answer: "


def test_the_candidates_of_wsc_are_the_nouns_that_are_asked_about():
    rows = superglue_cloze_rows("wsc", files("wsc"))
    # The row's own noun is the first. Where it is not meant, nobody says who is.
    assert rows["candidates"][:] == [["Ann", "Eve"], ["Eve", "Ann"]]
    assert rows["label"][:] == [-1, 0]
    assert superglue_cloze_rows("wsc", files("wsc"), answered_only=True)["candidates"][:] == [["Eve", "Ann"]]


def test_raw_rows_of_wsc_may_bring_candidates(caplog):
    alone = files("wsc").select([0])
    with caplog.at_level(logging.WARNING):
        assert superglue_cloze_rows("wsc", alone)["candidates"][:] == [["Ann"]]
    assert "1 of 1 rows of 'wsc' have one candidate only" in caplog.text
    caplog.clear()
    more = alone.add_column("candidates", [["boss", "Ann", " "]])
    assert superglue_cloze_rows("wsc", more)["candidates"][:] == [["Ann", "boss"]]
    as_objects = alone.add_column("candidates", [[{"text": "boss"}]])
    assert superglue_cloze_rows("wsc", as_objects)["candidates"][:] == [["Ann", "boss"]]
    assert caplog.text == ""


def test_a_query_without_answers_is_no_row_to_train_on():
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
        ("copa", {"question": "why"}, "Row 1 of 'copa' asks for 'why'; allowed are 'effect', 'cause'"),
        ("copa", {"choice2": ""}, "Row 1 of 'copa' has '' instead of a text in 'choice2'"),
        ("copa", {"choice2": "..."}, "Row 1 of 'copa' has nothing but punctuation in 'choice2'"),
        ("wsc", {"text": "He left."}, "Row 1 of 'wsc' has span2_text 'she', which is not in its text"),
    ],
)
def test_a_bad_row_is_named(task, changed, message):
    raw = [FILES[task][0], {**FILES[task][1], **changed}]
    with pytest.raises(ValueError, match=message):
        superglue_cloze_rows(task, Dataset.from_list(raw))


def test_a_missing_column_or_another_task_is_named():
    with pytest.raises(ValueError, match="Row 0 of 'rte' has no 'hypothesis'; it has 'premise', 'label'"):
        superglue_cloze_rows("rte", files("rte").remove_columns("hypothesis"))
    with pytest.raises(ValueError, match="'qnli' is no task of SuperGLUE; its tasks are 'boolq'"):
        superglue_cloze_rows("qnli", files("rte"))


def test_a_row_takes_less_than_a_millisecond():
    rows = Dataset.from_list([{**FILES["multirc"][0], "idx": place} for place in range(100)])
    assert milliseconds_per_example(lambda: superglue_cloze_rows("multirc", rows), 500) < 1
