"""The table of the communication that runs need: rounds and bytes to a target, and the score at equal bytes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hf_federated.data.markdown_table import markdown_table
from hf_federated.experiments.benchmark.comparison import Record, is_lower_better, step_names
from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.benchmark.reports.verdicts import number


_MEGABYTE = 1e6


def communication_report(records: Sequence[Record], section: BenchmarkSection, metric: str) -> list[str]:
    """
    The table of rounds and bytes, and its explanation, as paragraphs of Markdown. Empty without `benchmark.target`.

    Args:
        records (`Sequence[Mapping]`): The records of finished runs.
        section ([`BenchmarkSection`]): The section `benchmark`.
        metric (`str`): The compared metric.
    """
    federated = [record for record in records if record.get("num_rounds") and _bytes_of(record) is not None]
    if section.target is None or not federated:
        return []
    sign = -1 if is_lower_better(records, section) else 1
    budget = min(_bytes_of(record) or 0.0 for record in federated)
    rows = []
    for run in dict.fromkeys(record["run"] for record in federated):
        own = [record for record in federated if record["run"] == run]
        reached = [steps for record in own if (steps := _steps_to(record, metric, section.target, sign)) is not None]
        needed = [(_bytes_of(record) or 0.0) / record["num_rounds"] for record in own]
        scores = [score for record in own if (score := _score_at(record, metric, budget)) is not None]
        rows.append(
            [
                run.replace("|", r"\|"),
                f"{len(reached)} of {len(own)}",
                f"{statistics.mean(reached):g}" if reached else "-",
                f"{statistics.mean(reached) * statistics.mean(needed) / _MEGABYTE:.3g}" if reached else "-",
                number(statistics.mean(scores)) if scores else "-",
            ]
        )
    unit = step_names(federated)[0]
    header = ["run", "seeds that reach it", f"{unit}s", "MB", f"{metric} at {budget / _MEGABYTE:.3g} MB"]
    bound = "at most" if sign < 0 else "at least"
    text = (
        f"The first evaluation at which {metric} is {bound} {section.target:g}, as a mean over the seeds that reach"
        " it, with the bytes in both directions until then. The last column is the last evaluation within the bytes of"
        f" the run that sends the fewest. All {unit}s of a run count as equally large."
    )
    return ["### Communication", text, markdown_table(header, rows, {0, 1})]


def _bytes_of(record: Record) -> float | None:
    counts = [record.get("bytes_up"), record.get("bytes_down")]
    return None if None in counts else float(sum(count for count in counts if count is not None))


def _evaluations(record: Record, metric: str) -> list[tuple[int, float]]:
    history = record.get("history") or []
    return [(entry["round"], entry[metric]) for entry in history if entry.get(metric) is not None]


def _steps_to(record: Record, metric: str, target: float, sign: int) -> int | None:
    steps = (step for step, value in _evaluations(record, metric) if sign * value >= sign * target)
    return next(steps, None)


def _score_at(record: Record, metric: str, budget: float) -> float | None:
    per_step = (_bytes_of(record) or 0.0) / record["num_rounds"]
    scores = [value for step, value in _evaluations(record, metric) if step * per_step <= budget * (1 + 1e-9)]
    return scores[-1] if scores else None
