"""Read the log of a trainer: the values of each step, and the metrics of the final weights."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from ..reporting.metric_names import is_metric


Log = list[dict[str, Any]]


class LoggedRun(Protocol):
    """Trainer attributes that the functions of this module read."""

    state: Any
    run_args: Any  # the user's arguments; during training, `args` may hold the arguments of a local loop


def logs_by_step(log_history: Log, step_name: str, extra_keys: Iterable[str]) -> list[dict[str, Any]]:
    """
    Merge the log entries of each step. If a key was logged several times for a step, the first value is kept.

    Args:
        log_history (`list[dict]`):
            `trainer.state.log_history`.
        step_name (`str`):
            Key of the step in the returned dictionaries, such as `"round"`.
        extra_keys (`Iterable[str]`):
            Keys to keep in addition to metrics and keys under `federated/`.

    Returns:
        `list[dict[str, Any]]`: One dictionary per step, in ascending order of steps.
    """
    merged: dict[int, dict[str, Any]] = {}
    extra_keys = set(extra_keys)
    for entry in log_history:
        if "train_runtime" in entry:
            break  # the summary of the run; later evaluations are of the final weights, not of a step
        logs = merged.setdefault(entry["step"], {step_name: entry["step"]})
        for key, value in entry.items():
            if is_metric(key) or key.startswith("federated/") or key in extra_keys:
                logs.setdefault(key, to_json_value(value))
    return [merged[step] for step in sorted(merged)]


def final_weight_logs(trainer: LoggedRun) -> Log:
    """Return the log entries of the last evaluation of the final weights of the run."""
    log_history, state = trainer.state.log_history, trainer.state
    summaries = [index for index, entry in enumerate(log_history) if "train_runtime" in entry]
    during, after = (log_history[: summaries[-1]], log_history[summaries[-1] :]) if summaries else (log_history, [])
    steps = [entry["step"] for entry in after if any(map(is_metric, entry))]
    if steps:
        return [entry for entry in after if entry["step"] == steps[-1]]
    steps = [entry["step"] for entry in during if any(map(is_metric, entry))]
    if _ends_with_best(trainer):
        steps = [step for step in steps if step == state.best_global_step]
    return [entry for entry in during if steps and entry["step"] == steps[-1]]


def final_results(trainer: LoggedRun, entries: Log, step_name: str) -> dict[str, Any]:
    """
    Return the metrics of the final weights of the run.

    Args:
        trainer (`LoggedRun`):
            The run.
        entries (`list[dict]`):
            The log entries that [`final_weight_logs`] returns.
        step_name (`str`):
            Key of the step in the results.

    Returns:
        `dict[str, Any]`: The step, `best_by` and `metrics`. The dictionary is empty if there was no evaluation.
    """
    metrics = {key: to_json_value(value) for entry in entries for key, value in entry.items() if is_metric(key)}
    if not metrics:
        return {}
    best = _ends_with_best(trainer)
    return {
        step_name: trainer.state.best_global_step if best else entries[-1]["step"],
        "best_by": trainer.run_args.metric_for_best_model if best else None,
        "metrics": metrics,
    }


def training_seconds(log_history: Log) -> Any:
    """Return the seconds of the last completed call of `train`, or `None` if no call was completed."""
    runtimes = (entry["train_runtime"] for entry in log_history[::-1] if "train_runtime" in entry)
    return to_json_value(next(runtimes, None))


def _ends_with_best(trainer: LoggedRun) -> bool:
    """Return whether the run is over and its final weights are those of the best step."""
    is_over = any("train_runtime" in entry for entry in trainer.state.log_history)
    return is_over and trainer.run_args.load_best_model_at_end and trainer.state.best_global_step is not None


def to_json_value(value: Any) -> Any:
    """Convert a value to plain JSON types. Numbers that are not finite become strings."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, Enum):
        return to_json_value(value.value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):  # includes NumPy numbers, which are not Python floats
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)
