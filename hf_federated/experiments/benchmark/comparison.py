"""The values of finished runs, and the comparison of two runs seed by seed.

A claim holds if it holds on average and under every seed. This is not a test of significance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.errors import CommandError


# A record of a run, as read by `run_log`.
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """
    Result of a claim "A > B" over the seeds that both runs have.

    Args:
        differences (`list[float | None]`): For each seed, the difference between A and B, positive if A is better.
            `None` if a value is not finite.
    """

    differences: list[float | None]

    @property
    def finite(self) -> list[float]:
        """The finite differences."""
        return [difference for difference in self.differences if difference is not None]

    @property
    def num_agreeing(self) -> int:
        """Number of seeds under which A is better."""
        return sum(difference > 0 for difference in self.finite)

    @property
    def verdict(self) -> str:
        """
        `"holds"` if A is better on average and under every seed, `"mixed"` if A is better only on average, `"does not
        hold"` if A is not better on average, `"not measured"` if there is no finite difference.
        """
        if not self.finite:
            return "not measured"
        if np.mean(self.finite) <= 0:
            return "does not hold"
        return "holds" if self.num_agreeing == len(self.differences) else "mixed"


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


def is_lower_better(records: Sequence[Record], section: BenchmarkSection) -> bool:
    """Whether smaller values are better, according to the section or, by default, to the task of the main metric."""
    if section.lower_is_better is not None:
        return section.lower_is_better
    metric = main_metric(records, section)
    return any(record.get("lower_is_better", False) for record in records if record["metric"] == metric)


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


def compare(
    better: Mapping[int, float | None], worse: Mapping[int, float | None], lower_is_better: bool = False
) -> Comparison:
    """
    Check the claim that one run is better than another run, seed by seed.

    Args:
        better (`Mapping[int, float | None]`): Values by seed of the run that is claimed to be better.
        worse (`Mapping[int, float | None]`): Values by seed of the run that is claimed to be worse.
        lower_is_better (`bool`, *optional*, defaults to `False`): Whether smaller values are better.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.comparison import compare

    >>> comparison = compare({0: 0.75, 1: 0.5}, {0: 0.5, 1: 0.75, 2: 0.5})
    >>> comparison.differences, comparison.num_agreeing, comparison.verdict
    ([0.25, -0.25], 1, 'does not hold')

    ```
    """
    sign = -1 if lower_is_better else 1
    differences: list[float | None] = []
    for seed in sorted(better.keys() & worse.keys()):
        first, second = better[seed], worse[seed]
        differences.append(None if first is None or second is None else sign * (first - second))
    return Comparison(differences)


def step_names(records: Sequence[Record]) -> list[str]:
    """The units of the runs' steps: `"round"`, or `"optimizer step"` for split models. Old records have no unit."""
    names = [record.get("step_name") or "round" for record in records if record["method"] == "federated"]
    return list(dict.fromkeys(names)) or ["round"]
