"""The SuperGLUE metrics for each task and for the whole benchmark.

Source: Wang et al., "SuperGLUE" (2019), sections 3 and 4. The score of a task is the mean of its metrics. The
benchmark score is the unweighted mean over tasks. The two diagnostic sets do not contribute to the benchmark score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..metrics import F1, Accuracy, ExactMatch, MultiRC, TokenF1
from .templates import LABELS


NO_LABEL = -1  # stands for predictions that are not a label of the task


def superglue_scores(
    rows: Mapping[str, Sequence[Any]], predictions: Sequence[str | None], scores: Sequence[float]
) -> dict[str, float]:
    """
    Compute the SuperGLUE metrics of all tasks in the rows.

    - BoolQ, COPA, RTE, WiC, WSC: `accuracy`;
    - CB: `accuracy` and `f1_macro`, the mean F1 of its three labels;
    - MultiRC: `f1a` and `exact_match`, as in [`~hf_federated.tasks.metrics.MultiRC`];
    - ReCoRD: `token_f1` and `exact_match` of the candidate with the highest score, compared with the correct answer
      that gives the best value.

    The task name is the prefix of each metric (`cb_f1_macro`). `<task>_score` is the mean of a task's metrics.
    `superglue_score` is the unweighted mean of these scores over tasks. `accuracy` is the fraction of all rows with
    the correct label. A label of another task counts as wrong. All values are fractions, not percentages.

    Args:
        rows (`Mapping[str, Sequence]`): The columns of [`superglue_rows`], with all rows of each question.
        predictions (`Sequence[str]`): The predicted label name of each row, or `None` if the text is not a label name.
        scores (`Sequence[float]`):
            The score of each row's candidate, used for ReCoRD only. A higher score means that the candidate is more
            likely to be correct. If candidates have equal scores, the first one is the answer. If all candidates of a
            query have the score −∞, the answer is empty.

    Raises:
        ValueError: If the numbers of rows, predictions and scores differ, or if there are no rows.
        ImportError: If the rows contain CB and scikit-learn (extra `metrics`) is not installed.

    Example:

    ```python
    >>> from hf_federated.tasks.superglue import superglue_scores

    >>> rows = {"task": ["boolq", "boolq", "rte"], "target": ["Yes", "No", "Entailment"], "question": ["a", "b", "c"]}
    >>> superglue_scores(rows, ["Yes", "Yes", "Entailment"], [0.0, 0.0, 0.0])["superglue_score"]
    0.75

    ```
    """
    tasks = np.array(rows["task"])
    if not len(tasks) == len(predictions) == len(scores):
        raise ValueError(
            f"There are {len(tasks)} rows, but {len(predictions)} predictions and {len(scores)} scores. Pass one"
            " prediction and one score per row, in row order."
        )
    if not len(tasks):
        raise ValueError("There are no rows to compute the SuperGLUE metrics from. Pass at least one row.")
    metrics: dict[str, float] = {}
    task_scores = []
    for task in (name for name in LABELS if name in set(tasks)):
        chosen = np.flatnonzero(tasks == task).tolist()
        part = {name: [values[row] for row in chosen] for name, values in rows.items()}
        results = _task_metrics(task, part, [predictions[row] for row in chosen], [scores[row] for row in chosen])
        metrics |= {f"{task}_{name}": value for name, value in results.items()}
        task_scores.append(float(np.mean(list(results.values()))))
        metrics[f"{task}_score"] = task_scores[-1]
    correct = [label == target for label, target in zip(predictions, rows["target"], strict=True)]
    return {**metrics, "accuracy": float(np.mean(correct)), "superglue_score": float(np.mean(task_scores))}


def _task_metrics(
    task: str, rows: Mapping[str, Sequence[Any]], predictions: Sequence[str | None], scores: Sequence[float]
) -> dict[str, float]:
    if task == "record":
        answers, golds = best_candidates(rows, scores)
        return {
            **TokenF1().compute(predictions=answers, references=golds),
            **ExactMatch().compute(predictions=answers, references=golds),
        }
    numbers = {name: number for number, name in enumerate(LABELS[task].values())}
    labels = {
        "predictions": [numbers.get(name, NO_LABEL) if name is not None else NO_LABEL for name in predictions],
        "references": [numbers[name] for name in rows["target"]],
    }
    if task == "multirc":
        return MultiRC().compute(**labels, questions=rows["question"])
    metrics = Accuracy().compute(**labels)
    if task == "cb":
        metrics["f1_macro"] = F1(labels=range(len(numbers))).compute(**labels)["f1_macro"]
    return metrics


def best_candidates(rows: Mapping[str, Sequence[Any]], scores: Sequence[float]) -> tuple[list[str], list[list[str]]]:
    """
    Return the candidate with the highest score for each ReCoRD query.

    If candidates have equal scores, the first one is the answer. If all scores are −∞, the answer is empty.

    Args:
        rows (`Mapping[str, Sequence]`): The columns of [`superglue_rows`], with ReCoRD rows only.
        scores (`Sequence[float]`): The score of each row's candidate.

    Returns:
        `tuple[list[str], list[list[str]]]`: The predicted answers and the correct answers of each query.
    """
    best: dict[str, tuple[float, str]] = {}
    golds: dict[str, list[str]] = {}
    columns = zip(rows["question"], rows["answer"], rows["answers"], scores, strict=True)
    for question, candidate, answers, score in columns:
        golds[question] = list(answers)
        if score > best.setdefault(question, (-np.inf, ""))[0]:
            best[question] = (score, candidate)
    return [answer for _, answer in best.values()], [golds[question] for question in best]
