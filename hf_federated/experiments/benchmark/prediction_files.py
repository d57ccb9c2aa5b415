"""The files with the predictions of runs. A record names its file relative to the folder of `runs.jsonl`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_federated.experiments.predictions import PREDICTIONS_NAME, read_predictions, write_predictions


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
