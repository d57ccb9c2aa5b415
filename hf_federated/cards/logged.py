"""What a card reads of a trainer's log: rows over the run, and the metrics of the weights that it ended with."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol


Log = list[dict[str, Any]]


class LoggedRun(Protocol):
    """What is read of a trainer here."""

    state: Any
    run_args: Any  # while it trains, `args` may hold those of a loop


def is_metric(key: str) -> bool:
    """Whether a logged key is a result of a global evaluation, and not its speed."""
    return key.startswith("eval_") and not key.endswith(("_runtime", "_per_second", "_time"))


def rows_by_step(log_history: Log, name: str, others: Iterable[str]) -> list[dict[str, Any]]:
    """
    One row a step of the trainer, of everything logged with it; the first of several values counts.

    Args:
        log_history (`list[dict]`): `trainer.state.log_history`.
        name (`str`): What a row calls its step.
        others (`Iterable[str]`): Keys to take beside metrics and those under `federated/`.
    """
    rows: dict[int, dict[str, Any]] = {}
    others = set(others)
    for entry in log_history:
        if "train_runtime" in entry:
            break  # the run's summary; an evaluation after it is of the final weights, not of a step
        row = rows.setdefault(entry["step"], {name: entry["step"]})
        for key, value in entry.items():
            if is_metric(key) or key.startswith("federated/") or key in others:
                row.setdefault(key, plain(value))
    return [rows[step] for step in sorted(rows)]


def of_final_weights(trainer: LoggedRun) -> Log:
    """What was logged by the last evaluation of the weights that the run ended with."""
    logged, state = trainer.state.log_history, trainer.state
    summaries = [position for position, entry in enumerate(logged) if "train_runtime" in entry]
    during, after = (logged[: summaries[-1]], logged[summaries[-1] :]) if summaries else (logged, [])
    steps = [entry["step"] for entry in after if any(map(is_metric, entry))]
    if steps:
        return [entry for entry in after if entry["step"] == steps[-1]]
    steps = [entry["step"] for entry in during if any(map(is_metric, entry))]
    if _ends_with_best(trainer):
        steps = [step for step in steps if step == state.best_global_step]
    return [entry for entry in during if steps and entry["step"] == steps[-1]]


def final_results(trainer: LoggedRun, entries: Log, name: str) -> dict[str, Any]:
    """
    The metrics of the weights that the run ended with.

    Args:
        trainer (`LoggedRun`): The run.
        entries (`list[dict]`): As `of_final_weights` finds them.
        name (`str`): What the results call their step.

    Returns:
        `dict[str, Any]`: The step, `best_by` and `metrics`; empty if nothing was evaluated.
    """
    metrics = {key: plain(value) for entry in entries for key, value in entry.items() if is_metric(key)}
    if not metrics:
        return {}
    best = _ends_with_best(trainer)
    return {
        name: trainer.state.best_global_step if best else entries[-1]["step"],
        "best_by": trainer.run_args.metric_for_best_model if best else None,
        "metrics": metrics,
    }


def training_seconds(log_history: Log) -> Any:
    """Seconds of the last call of `train`, if it came to its end."""
    return plain(next((entry["train_runtime"] for entry in log_history[::-1] if "train_runtime" in entry), None))


def _ends_with_best(trainer: LoggedRun) -> bool:
    """Whether the run is over and its weights are those of the best step."""
    over = any("train_runtime" in entry for entry in trainer.state.log_history)
    return over and trainer.run_args.load_best_model_at_end and trainer.state.best_global_step is not None


def plain(value: Any) -> Any:
    """A value as JSON holds it; numbers that are not finite become words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):  # also numpy's, which are no Python floats
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)
