"""The values of finished runs: the metric to compare, its direction, and its values by run and seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.errors import CommandError
from hf_federated.reporting.metric_names import lower_is_better


# A record of a run, as read by `run_log`.
Record = Mapping[str, Any]


def main_metric(records: Sequence[Record], section: BenchmarkSection) -> str:
    """
    The metric to compare: the metric of the section or, by default, the main metric of the runs.

    Args:
        records (`Sequence[Mapping]`): The records of finished runs.
        section ([`BenchmarkSection`]): The section `benchmark`.

    Raises:
        CommandError: If the runs have different main metrics, or a run does not have the metric or one of the further
            metrics.
    """
    main_metrics = list(dict.fromkeys(record["metric"] for record in records))
    if section.metric is None and len(main_metrics) > 1:
        raise CommandError(
            f"benchmark.metric: the runs have several main metrics ({', '.join(main_metrics)}). Set one of them."
        )
    metric = section.metric or (main_metrics[0] if main_metrics else "value")
    fields = [("metric", metric), *(("further_metrics", name) for name in section.further_metrics)]
    for record in records:
        for field, name in fields:
            if name not in record["metrics"]:
                known = ", ".join(record["metrics"]) or "none"
                raise CommandError(
                    f"benchmark.{field}: {record['run']!r} has no metric {name!r}. Its metrics are {known}."
                )
    return metric


def is_lower_better(records: Sequence[Record], section: BenchmarkSection, metric: str | None = None) -> bool:
    """
    Whether smaller values of a metric are better.

    The section decides on its own metric, the task on the main metric of the runs, and the name on other metrics.

    Args:
        records (`Sequence[Mapping]`): The records of finished runs.
        section ([`BenchmarkSection`]): The section `benchmark`.
        metric (`str`, *optional*): The metric. Defaults to the metric to compare.
    """
    compared = main_metric(records, section)
    if metric in (None, compared) and section.lower_is_better is not None:
        return section.lower_is_better
    metric = metric or compared
    directions = {record.get("lower_is_better") for record in records if record["metric"] == metric} - {None}
    return any(directions) if directions else lower_is_better(metric, None, None)


def values_by_run(
    records: Sequence[Record], section: BenchmarkSection, metric: str
) -> dict[str, dict[int, float | None]]:
    """
    Values of a metric by run and seed.

    Args:
        records (`Sequence[Mapping]`): The records of finished runs.
        section ([`BenchmarkSection`]): The section `benchmark`.
        metric (`str`): Name of the metric.

    Returns:
        `dict[str, dict[int, float | None]]`: Maps the name of each run to its values by seed. A value is `None` if it
        was not finite.
    """
    values: dict[str, dict[int, float | None]] = {name: {} for name in section.runs}
    for seed in section.seeds:
        for record in records:
            if record["seed"] == seed and record["run"] in values:
                values[record["run"]][seed] = record["metrics"][metric]
    return values


def has_only_fallbacks(record: Record) -> bool:
    """
    Whether a run of AdaFD had the weights of ENWC in each round, because its language model never returned weights.

    Args:
        record (`Mapping`): The record of a finished run.
    """
    fell_back = [entry["llm_fell_back"] for entry in record["history"] if "llm_fell_back" in entry]
    return bool(fell_back) and all(fell_back)


def step_names(records: Sequence[Record]) -> list[str]:
    """The units of the runs' steps: `"round"`, or `"optimizer step"` for split models. Old records have no unit."""
    names = [record.get("step_name") or "round" for record in records if record["method"] == "federated"]
    return list(dict.fromkeys(names)) or ["round"]
