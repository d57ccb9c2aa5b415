"""The files with the predictions of runs. A record names its file relative to the folder of `runs.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_federated.experiments.predictions import MAIN_TEST, PREDICTIONS_NAME, read_predictions, write_predictions


# The predictions of a run on its test examples: whether the prediction is correct (1 or 0, or a share of models), and
# the log-probability of the label, by the hash of the row. `None` if the run did not store them.
Examples = Mapping[str, tuple[float, float]]
ReadExamples = Callable[[str, int], "Examples | None"]


def relative_path(path: str | None, folder: Path) -> str | None:
    """
    The path of a file relative to the folder of `runs.jsonl`, with `/` on each system.

    Args:
        path (`str`, *optional*): The file. `None` is returned unchanged.
        folder (`pathlib.Path`): The folder of `runs.jsonl`.
    """
    return None if path is None else Path(os.path.relpath(path, folder)).as_posix()


def copy_predictions(record: Mapping[str, Any], source: Path, target: Path, run_folder: str) -> str | None:
    """
    Copy the predictions of a record that another benchmark reuses.

    Args:
        record (`Mapping[str, Any]`): The record.
        source (`pathlib.Path`): The folder of its `runs.jsonl`.
        target (`pathlib.Path`): The folder of the other `runs.jsonl`.
        run_folder (`str`): The folder of the run, relative to `target`.

    Returns:
        `str`: The path for the copied record. `None` if the record is older than the predictions, its task has none,
        or its file is missing.

    Raises:
        ValueError: If the file is not a file of predictions.
    """
    path = record.get("predictions")
    predictions = read_predictions(source / path) if isinstance(path, str) else {}
    if not predictions:
        return None
    copied = target / run_folder / PREDICTIONS_NAME
    write_predictions(copied, predictions)
    return relative_path(str(copied), target)


def examples_of(records: Sequence[Mapping[str, Any]], folder: Path) -> ReadExamples:
    """
    Return a function that reads the predictions of a run for the test examples.

    Args:
        records (`Sequence[Mapping]`): The records of finished runs.
        folder (`pathlib.Path`): The folder of `runs.jsonl`.

    Returns:
        `Callable`: Called with the name and the seed of a run, as in
        [`~hf_federated.experiments.benchmark.reports.verdicts.evaluate_claims`]. Files that are missing have no
        predictions.
    """
    paths = {(record["run"], record["seed"]): record.get("predictions") for record in records}
    cache: dict[tuple[str, int], Mapping[str, tuple[float, float]] | None] = {}

    def read(run: str, seed: int) -> Mapping[str, tuple[float, float]] | None:
        path = paths.get((run, seed))
        if (run, seed) not in cache:
            stored = read_predictions(folder / path) if isinstance(path, str) else {}
            cache[run, seed] = stored[MAIN_TEST].by_row() if MAIN_TEST in stored else None
        return cache[run, seed]

    return read
