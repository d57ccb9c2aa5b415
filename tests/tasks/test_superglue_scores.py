"""Tests of the SuperGLUE metrics against scikit-learn and against values computed by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, f1_score
from superglue_raw import benchmark

from hf_federated.tasks.metrics import MultiRC
from hf_federated.tasks.superglue import LABELS, superglue_scores


def table(task: str, targets: list[str], **columns: list[Any]) -> dict[str, list[Any]]:
    return {"task": [task] * len(targets), "target": targets, "question": [""] * len(targets), **columns}


# ---- MultiRC


@pytest.mark.parametrize("seed", range(3))
def test_multirc_f1_equals_scikit_learn(seed):
    generator = np.random.default_rng(seed)
    predictions, references = generator.integers(2, size=(2, 200))
    questions = [f"question {number}" for number in generator.integers(60, size=200)]
    scores = MultiRC().compute(predictions=predictions, references=references, questions=questions)
    assert scores["f1a"] == pytest.approx(f1_score(references, predictions))
    matches = {question: True for question in questions}
    for question, predicted, true in zip(questions, predictions, references, strict=True):
        matches[question] &= predicted == true
    assert scores["exact_match"] == pytest.approx(np.mean(list(matches.values())))


def test_multirc_exact_match_groups_answers_in_any_order():
    # Both answers of p are predicted correctly, one answer of q is not. TP 1, FP 1, FN 0.
    scores = MultiRC().compute(predictions=[1, 0, 0, 1], references=[1, 0, 0, 0], questions=["p", "q", "p", "q"])
    assert scores == {"f1a": pytest.approx(2 / 3), "exact_match": 0.5}


def test_multirc_invalid_prediction_is_neither_positive_nor_match():
    scores = MultiRC().compute(predictions=[1, -1, -1], references=[1, 1, 0], questions=["p", "q", "r"])
    # TP 1, FN 1.
    assert scores == {"f1a": pytest.approx(2 / 3), "exact_match": pytest.approx(1 / 3)}


def test_multirc_f1_is_zero_without_correct_or_predicted_answers():
    assert MultiRC().compute(predictions=[0], references=[0], questions=["p"]) == {"f1a": 0.0, "exact_match": 1.0}


# ---- Tasks


def test_cb_score_is_mean_of_accuracy_and_macro_f1():
    names = ["Entailment", "Contradiction", "Neutral"]
    generator = np.random.default_rng(0)
    true, predicted = generator.integers(3, size=(2, 60))
    scores = superglue_scores(table("cb", [names[i] for i in true]), [names[i] for i in predicted], [0.0] * 60)
    accuracy, f1 = accuracy_score(true, predicted), f1_score(true, predicted, average="macro")
    assert scores["cb_accuracy"] == pytest.approx(accuracy) and scores["cb_f1_macro"] == pytest.approx(f1)
    assert scores["cb_score"] == scores["superglue_score"] == pytest.approx((accuracy + f1) / 2)


def test_cb_macro_f1_includes_absent_label():
    scores = superglue_scores(table("cb", ["Entailment", "Contradiction"]), ["Entailment", "Contradiction"], [0, 0])
    assert scores["cb_f1_macro"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("task", ["boolq", "copa", "rte", "wic", "wsc"])
def test_other_tasks_have_accuracy(task):
    first, second = LABELS[task].values()
    scores = superglue_scores(table(task, [first, second, second]), [first, second, first], [0.0] * 3)
    assert scores == {
        f"{task}_accuracy": pytest.approx(2 / 3),
        f"{task}_score": pytest.approx(2 / 3),
        "accuracy": pytest.approx(2 / 3),
        "superglue_score": pytest.approx(2 / 3),
    }


def record(golds: dict[str, list[str]], candidates: dict[str, list[str]]) -> dict[str, list[Any]]:
    rows = [(question, answer) for question, answers in candidates.items() for answer in answers]
    return table(
        "record",
        ["Correct" if answer in golds[question] else "Wrong" for question, answer in rows],
        question=[question for question, _ in rows],
        answer=[answer for _, answer in rows],
        answers=[golds[question] for question, _ in rows],
    )


def test_record_compares_best_candidate_with_closest_correct_answer():
    rows = record(
        {"p": ["Bo Ek", "Bo"], "q": ["Ada Lund"]}, {"p": ["Malmo", "Bo", "Bo Ek"], "q": ["Ada Lund", "the Lund Inn"]}
    )
    # For p, "Bo" is correct. For q, "lund inn" and "ada lund" share one of two words, so F1 is 2 · 1 / 4.
    scores = superglue_scores(rows, ["Wrong"] * 5, [-1.0, 3.0, 2.0, -4.0, -3.0])
    assert scores["record_exact_match"] == 0.5
    assert scores["record_token_f1"] == pytest.approx((1 + 0.5) / 2)
    assert scores["record_score"] == pytest.approx((0.5 + 0.75) / 2)


def test_record_uses_first_of_equal_candidates_and_empty_answer_without_scores():
    rows = record({"p": ["Ada"], "q": ["Bo"]}, {"p": ["Ada", "Bo"], "q": ["Bo", "Eve"]})
    assert superglue_scores(rows, ["Wrong"] * 4, [0.0] * 4)["record_exact_match"] == 1.0
    no_scores = [0.0, 0.0, -math.inf, -math.inf]
    assert superglue_scores(rows, ["Wrong"] * 4, no_scores)["record_exact_match"] == 0.5


# ---- Benchmark


def test_correct_labels_score_one_on_all_tasks():
    rows = benchmark()[:]
    candidate_scores = [float(target == "Correct") for target in rows["target"]]
    scores = superglue_scores(rows, rows["target"], candidate_scores)
    assert set(scores.values()) == {1.0}
    expected = {f"{task}_score" for task in LABELS} | {"superglue_score", "accuracy", "cb_f1_macro"}
    assert expected | {"multirc_f1a", "multirc_exact_match", "record_token_f1", "record_exact_match"} <= set(scores)


def test_superglue_score_weights_tasks_equally():
    targets = ["Yes"] * 99 + ["No"] + ["Match"]
    rows = {"task": ["boolq"] * 100 + ["wic"], "target": targets, "question": [""] * 101}
    scores = superglue_scores(rows, ["Yes"] * 100 + ["Mismatch"], [0.0] * 101)
    assert scores["superglue_score"] == pytest.approx((0.99 + 0) / 2)
    assert scores["accuracy"] == pytest.approx(99 / 101)


def test_scores_do_not_depend_on_row_order():
    rows = benchmark()[:]
    order = np.random.default_rng(0).permutation(len(rows["task"]))
    predictions = [target if number % 3 else "Yes" for number, target in enumerate(rows["target"])]
    scores = [number / 7 % 1 for number in range(len(predictions))]
    mixed = {name: [values[row] for row in order] for name, values in rows.items()}
    again = superglue_scores(mixed, [predictions[row] for row in order], [scores[row] for row in order])
    assert again == pytest.approx(superglue_scores(rows, predictions, scores))


def test_label_of_another_task_and_missing_label_are_wrong():
    scores = superglue_scores(table("rte", ["Entailment", "Not_entailment"]), ["Yes", None], [0.0, 0.0])
    assert scores["rte_accuracy"] == 0


def test_different_numbers_of_rows_and_predictions_raise():
    with pytest.raises(ValueError, match="There are 1 rows, but 2 predictions and 1 scores"):
        superglue_scores(table("rte", ["Entailment"]), ["Entailment"] * 2, [0.0])
    with pytest.raises(ValueError, match="There are no rows"):
        superglue_scores(table("rte", []), [], [])
