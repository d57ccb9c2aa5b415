"""The metrics of SuperGLUE: of each task, of the benchmark.

Source: Wang et al., "SuperGLUE" (2019), sections 3 and 4: a task's score is the mean of its metrics, and the
benchmark's the unweighted mean over tasks. The two diagnostic sets are not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..metrics import F1, Accuracy, ExactMatch, MultiRC, TokenF1
from .templates import LABELS


NO_LABEL = -1  # a prediction that is none of the task's labels


def superglue_scores(
    rows: Mapping[str, Sequence[Any]], predictions: Sequence[str | None], scores: Sequence[float]
) -> dict[str, float]:
    """
    The metrics of SuperGLUE over the tasks that occur.

    - BoolQ, COPA, RTE, WiC, WSC: `accuracy`;
    - CB: `accuracy` and `f1_macro`, the mean F1 of its three labels;
    - MultiRC: `f1a` and `exact_match`, as [`~hf_federated.tasks.metrics.MultiRC`] defines them;
    - ReCoRD: `token_f1` and `exact_match` of the one answer to a query, the candidate with the highest score, against
      the right answer that it agrees with best.

    Each stands behind the task's name (`cb_f1_macro`). `<task>_score` is the mean of a task's metrics,
    `superglue_score` the unweighted mean of these over tasks, and `accuracy` the share of all rows whose label is
    right. A label of another task is wrong. All are shares of 1.

    Args:
        rows (`Mapping[str, Sequence]`): The columns of [`superglue_rows`]. All rows of a question have to be there.
        predictions (`Sequence[str]`): The name of each row's predicted label; `None` for a text that names none.
        scores (`Sequence[float]`):
            How sure each row's candidate is the right one; of a query with none above −∞ the answer is empty. Read of
            ReCoRD alone; of equal candidates the first counts.

    Raises:
        ValueError: If there are not as many predictions or scores as rows, or no rows.
        ImportError: If scikit-learn (extra `metrics`) is not installed, and CB is among the tasks.

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
            f"There are {len(tasks)} rows, but {len(predictions)} predictions and {len(scores)} scores. Give each row"
            " one, in the order of the rows."
        )
    if not len(tasks):
        raise ValueError("There are no rows to compute SuperGLUE's metrics from.")
    metrics: dict[str, float] = {}
    task_scores = []
    for task in (name for name in LABELS if name in set(tasks)):
        chosen = np.flatnonzero(tasks == task).tolist()
        part = {name: [values[row] for row in chosen] for name, values in rows.items()}
        of_task = _task_metrics(task, part, [predictions[row] for row in chosen], [scores[row] for row in chosen])
        metrics |= {f"{task}_{name}": value for name, value in of_task.items()}
        task_scores.append(float(np.mean(list(of_task.values()))))
        metrics[f"{task}_score"] = task_scores[-1]
    right = [label == target for label, target in zip(predictions, rows["target"], strict=True)]
    return {**metrics, "accuracy": float(np.mean(right)), "superglue_score": float(np.mean(task_scores))}


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
    The answer to each query: its candidate with the highest score, the first of equals; empty if all are −∞.

    Args:
        rows (`Mapping[str, Sequence]`): The columns of [`superglue_rows`], of ReCoRD.
        scores (`Sequence[float]`): Of each row's candidate.

    Returns:
        `tuple[list[str], list[list[str]]]`: The answers, and the right ones of each query.
    """
    best: dict[str, tuple[float, str]] = {}
    golds: dict[str, list[str]] = {}
    columns = zip(rows["question"], rows["answer"], rows["answers"], scores, strict=True)
    for question, candidate, right, score in columns:
        golds[question] = list(right)
        if score > best.setdefault(question, (-np.inf, ""))[0]:
            best[question] = (score, candidate)
    return [answer for _, answer in best.values()], [golds[question] for question in best]
