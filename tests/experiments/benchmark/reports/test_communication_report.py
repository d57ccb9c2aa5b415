"""Rounds and bytes to a target, and the score at equal bytes."""

from __future__ import annotations

import pytest

from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.benchmark.reports.report import benchmark_report
from hf_federated.experiments.errors import CommandError


def record(run, seed, curve, megabytes, method="federated", metric="accuracy"):
    """A run of four rounds that is evaluated after rounds 2 and 4, or after each round."""
    steps = [2, 4] if len(curve) == 2 else [1, 2, 3, 4]
    return {
        "run": run,
        "seed": seed,
        "method": method,
        "metric": metric,
        "metrics": {metric: curve[-1]},
        "history": [{"round": step, metric: value} for step, value in zip(steps, curve, strict=True)],
        "num_rounds": 4 if method == "federated" else None,
        "bytes_up": megabytes * 0.75e6 if method == "federated" else None,
        "bytes_down": megabytes * 0.25e6 if method == "federated" else None,
    }


RECORDS = [
    record("large", 0, [0.2, 0.5, 0.6, 0.7], 8),
    record("large", 1, [0.1, 0.4, 0.5, 0.9], 8),
    record("small", 0, [0.3, 0.4], 4),
    record("small", 1, [0.3, 0.6], 4),
    record("central", 0, [0.9, 0.9], None, method="centralized"),
]


def cells(report: str, run: str) -> list[str]:
    table = report.split("### Communication")[1]
    line = next(line for line in table.splitlines() if line.startswith(f"| {run}"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_rounds_and_bytes_to_a_target_and_score_at_equal_bytes():
    runs = {"large": {}, "small": {}, "central": {"method": "centralized"}}
    report = benchmark_report(RECORDS, BenchmarkSection(runs, seeds=[0, 1], target=0.5), "recipe")
    # Rounds 2 and 3 of 2 MB each; after two rounds, 4 MB are sent.
    assert cells(report, "large") == ["2 of 2", "2.5", "5", "0.4500"]
    assert cells(report, "small") == ["1 of 2", "4", "4", "0.5000"]
    assert "accuracy at 4 MB" in report and "central" not in report.split("### Communication")[1]


def test_lower_metric_has_to_be_at_most_the_target():
    records = [record("a", 0, [3.0, 2.0, 1.5, 1.0], 4, metric="loss")]
    report = benchmark_report(records, BenchmarkSection({"a": {}}, seeds=[0], target=1.5), "recipe")
    assert cells(report, "a") == ["1 of 1", "3", "3", "1.0000"] and "at most 1.5" in report


def test_no_table_without_a_target_and_a_wrong_target_is_an_error():
    assert "Communication" not in benchmark_report(RECORDS[:4], BenchmarkSection({"large": {}, "small": {}}), "recipe")
    with pytest.raises(CommandError, match="benchmark.target is nan"):
        BenchmarkSection({"a": {}}, target=float("nan"))
