"""The evaluation of claims: paired differences of finished runs, and a verdict for each claim.

A verdict needs the 95 % interval over seeds on one side of 0, or of the margin, and a p-value below 0.05 after Holm's
correction for all claims of the recipe. Former claims count, so a changed claim does not relax the correction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_federated.experiments.benchmark.claims import BYTES, COSTS, VARIATION, Claim
from hf_federated.experiments.benchmark.comparison import Record, is_lower_better, main_metric
from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.benchmark.paired_statistics import (
    CONFIDENCE,
    PairedDifferences,
    bootstrap_interval,
    holm,
)
from hf_federated.experiments.benchmark.prediction_files import ReadExamples
from hf_federated.experiments.text import plural


# The metrics that are means over test examples, with the position of their value in the predictions of an example.
EXAMPLE_METRICS = {"accuracy": 0, "loss": 1}
# Number of recorded names that the reason of a claim without a measurement lists.
MAX_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """
    A claim and its comparison over the seeds that both runs have.

    Args:
        claim ([`Claim`]): The claim.
        is_former (`bool`): Whether the claim was changed or dropped after a run.
        metric (`str`): The compared metric.
        differences ([`PairedDifferences`], *optional*): The differences over seeds, positive if the first run is
            better. `None` if there are none.
        loss ([`PairedDifferences`], *optional*): The same differences in loss, positive if the first run has the lower
            loss. `None` if the claim is about loss or bytes, or the runs have no loss.
        num_compared (`int`): Number of seeds that both runs have.
        num_seeds (`int`): Number of seeds of the recipe.
        reason (`str`, *optional*): Why some seeds have no difference.
        adjusted_p (`float`, *optional*): The p-value after Holm's correction. `None` without a test.
        example_interval (`tuple[float, float]`, *optional*): The 95 % interval over test examples.
    """

    claim: Claim
    is_former: bool
    metric: str
    differences: PairedDifferences | None
    loss: PairedDifferences | None
    num_compared: int
    num_seeds: int
    reason: str | None = None
    adjusted_p: float | None = None
    example_interval: tuple[float, float] | None = None

    @property
    def num_agreeing(self) -> int:
        """Number of seeds under which the claim is true."""
        values = self.differences.values if self.differences else ()
        if self.claim.is_equality:
            return sum(abs(value) < self.claim.margin for value in values)
        return sum(value > self.claim.margin for value in values)

    @property
    def obstacle(self) -> str | None:
        """Why the differences allow no decision at any size, or `None`."""
        if self.differences is None:
            return self.reason
        if len(self.differences.values) < self.num_compared:
            return self.reason
        if len(self.differences.values) == 1:
            return "one seed has no spread"
        if self.differences.is_constant and self.metric not in BYTES and any(self.differences.values):
            return "the difference is the same under every seed, so its spread is unknown"
        if self.differences.is_constant and self.outcome is None:
            return f"the difference is {number(self.differences.mean)} under every seed"
        return None

    @property
    def outcome(self) -> str | None:
        """The verdict that the interval alone allows, or `None` if the interval contains 0 or the margin."""
        interval = self.differences.interval if self.differences else None
        if interval is None:
            return None
        low, high = interval
        margin = self.claim.margin
        if self.claim.is_equality:
            if -margin < low and high < margin:
                return f"equal within {margin:g}"
            return f"not equal within {margin:g}" if low > margin or high < -margin else None
        if low > margin:
            return "holds"
        return "does not hold" if high < margin else None

    @property
    def verdict(self) -> str:
        """
        `"holds"`, `"does not hold"`, `"equal within m"`, `"not equal within m"`, `"cannot be told"` with the reason or
        the smallest visible difference, or `"not measured"` with the reason. `"so far"` if seeds are missing.
        """
        so_far = " so far" if 0 < self.num_compared < self.num_seeds else ""
        if self.differences is None:
            return f"not measured{so_far}: {self.reason}"
        if self.obstacle:
            return f"cannot be told{so_far}: {self.obstacle}"
        if self.outcome is None:
            what = "differences from the margin" if self.claim.margin and not self.claim.is_equality else "differences"
            return f"cannot be told{so_far}, {what} below {number(self.differences.visible)} are not visible"
        if self.adjusted_p is not None and self.adjusted_p >= 1 - CONFIDENCE:
            return f"cannot be told{so_far}, not after Holm's correction"
        return f"{self.outcome}{so_far}"


def evaluate_claims(
    records: Sequence[Record], section: BenchmarkSection, read_examples: ReadExamples | None = None
) -> list[ClaimResult]:
    """
    Compare the runs of each claim and of each former claim of a recipe.

    Args:
        records (`Sequence[Mapping]`):
            The records of finished runs.
        section ([`BenchmarkSection`]):
            The section `benchmark`.
        read_examples (`Callable`, *optional*):
            Called with the name and the seed of a run. Returns the predictions of the run as a mapping from the hash
            of each test row to `(correct, log-probability of the label)`, or `None`.

    Example:

    ```python
    >>> from hf_federated.experiments.benchmark.grid import BenchmarkSection
    >>> from hf_federated.experiments.benchmark.reports.verdicts import evaluate_claims

    >>> section = BenchmarkSection({"A": {}, "B": {}}, claims=["A > B", "A > B by 0.07"])
    >>> values = {"A": (0.70, 0.72, 0.71), "B": (0.62, 0.65, 0.62)}
    >>> records = [
    ...     {"run": run, "seed": seed, "metric": "accuracy", "metrics": {"accuracy": value}}
    ...     for run, by_seed in values.items()
    ...     for seed, value in enumerate(by_seed)
    ... ]
    >>> [result.verdict for result in evaluate_claims(records, section)]
    ['holds', 'cannot be told, differences from the margin below 0.0310 are not visible']

    ```
    """
    main = main_metric(records, section)
    by_key = {(record["run"], record["seed"]): record for record in records}
    results = []
    for number_of_claim, claim in enumerate(section.parsed_claims()):
        metric = claim.metric or main
        sign = -1 if metric in COSTS or is_lower_better(records, section, metric) else 1
        differences, num_compared, reason = _compare(by_key, section, claim, metric, sign)
        has_loss = metric != "loss" and metric not in COSTS
        results.append(
            ClaimResult(
                claim=claim,
                is_former=number_of_claim >= len(section.claims),
                metric=metric,
                differences=differences,
                loss=_compare(by_key, section, claim, "loss", -1)[0] if has_loss else None,
                num_compared=num_compared,
                num_seeds=len(section.seeds),
                reason=reason,
                example_interval=_interval_over_examples(by_key, section, claim, metric, read_examples),
            )
        )
    return _with_adjusted_p(results)


def number(value: float | None, signed: bool = False) -> str:
    """
    Format with four decimals (accuracies), two decimals from 10 on (percentages and perplexities) or three digits from
    100 000 on (bytes). `None` is formatted as `-`.
    """
    if value is None:
        return "-"
    spec = ".4f" if abs(value) < 10 else ".2f" if abs(value) < 1e5 else ".3g"
    return format(value, ("+" if signed else "") + spec)


def _with_adjusted_p(results: Sequence[ClaimResult]) -> list[ClaimResult]:
    """Set the adjusted p-value of the claims that are tested."""
    tested: dict[int, float] = {}
    for position, result in enumerate(results):
        if result.differences is None or result.obstacle:
            continue
        claim = result.claim
        test = result.differences.p_value_of_equality if claim.is_equality else result.differences.p_value
        if (p := test(claim.margin)) is not None:
            tested[position] = p
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [dataclasses.replace(result, adjusted_p=adjusted.get(place)) for place, result in enumerate(results)]


class _NotRecorded(LookupError):
    """A record does not have the value that a claim compares. The message states what the record has."""


def _compare(
    by_key: Mapping[tuple[str, int], Record], section: BenchmarkSection, claim: Claim, metric: str, sign: int
) -> tuple[PairedDifferences | None, int, str | None]:
    """Return the finite differences, the number of seeds that both runs have, and why seeds have no difference."""
    differences, num_compared, reason = [], 0, None
    runs = (claim.first, claim.second)
    for seed in section.seeds:
        missing = [run for run in runs if (run, seed) not in by_key]
        if missing:
            reason = reason or f"no finished runs of {' and '.join(missing)} under seed {seed}"
            continue
        try:
            first, second = (
                _variation(by_key[run, seed], section)
                if metric == VARIATION
                else _value(by_key[run, seed], claim, metric)
                for run in runs
            )
        except _NotRecorded as error:
            reason = str(error)
            continue
        num_compared += 1
        difference = math.nan if first is None or second is None else sign * (first - second)
        if math.isfinite(difference):
            differences.append(difference)
    if len(differences) < num_compared:
        reason = f"no finite {metric} under {plural(num_compared - len(differences), 'seed')}"
    return PairedDifferences(tuple(differences)) if differences else None, num_compared, reason


def _value(record: Record, claim: Claim, metric: str) -> float | None:
    """The value that a claim compares, or `None` if it was not finite."""
    if metric in BYTES:
        counts = [record.get(name) for name in BYTES[metric]]
        if None in counts:
            raise _NotRecorded(f"{record['run']} has no {' and '.join(BYTES[metric])}")
        return float(sum(count for count in counts if count is not None))
    metrics = record["metrics"]
    for field, name in (("further_tests", claim.split), ("clients", claim.client)):
        if name is not None:
            metrics = _entry(record, record.get(field) or {}, name, "test split" if claim.split else "client")
    if claim.step is not None:
        metrics = _metrics_after(record, claim.step)
    return _entry(record, metrics, metric, "metric")


def _variation(record: Record, section: BenchmarkSection) -> float | None:
    """The standard deviation of the changes of the metric from one evaluation to the next."""
    metric = main_metric([record], section)
    values = [entry[metric] for entry in record.get("history") or [] if metric in entry]
    if len(values) < 3:
        raise _NotRecorded(f"{record['run']} has {plural(len(values), 'evaluation')}, and the variation needs three")
    return None if None in values else float(np.std(np.diff(values), ddof=1))


def _metrics_after(record: Record, step: int) -> Mapping[str, float | None]:
    """The metrics of a federation after a round, or at the end of the run if this was its last round."""
    steps = [entry["round"] for entry in record.get("history") or [] if entry.keys() & record["metrics"].keys()]
    if record.get("method", "federated") == "federated":
        if step in steps:
            return next(entry for entry in record["history"] if entry["round"] == step)
        if step == record.get("num_rounds"):
            return record["metrics"]
    evaluated = ", ".join(map(str, steps[-MAX_NAMES:])) or "none"
    raise _NotRecorded(f"{record['run']} was not evaluated after step {step}, but after {evaluated}")


def _entry(record: Record, values: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in values:
        known = ", ".join(list(values)[:MAX_NAMES]) or "none"
        raise _NotRecorded(
            f"{record['run']} has no {kind} {name!r}, but {known}{', …' if len(values) > MAX_NAMES else ''}"
        )
    return values[name]


def _interval_over_examples(
    by_key: Mapping[tuple[str, int], Record],
    section: BenchmarkSection,
    claim: Claim,
    metric: str,
    read_examples: ReadExamples | None,
) -> tuple[float, float] | None:
    """The bootstrap interval over the test examples of all seeds, if both runs stored their predictions."""
    if read_examples is None or metric not in EXAMPLE_METRICS:
        return None
    if not dataclasses.replace(claim, metric=None).is_about_results:
        return None
    rows: list[list[str]] = []
    first: list[np.ndarray] = []
    second: list[np.ndarray] = []
    position = EXAMPLE_METRICS[metric]
    for seed in section.seeds:
        if (claim.first, seed) not in by_key or (claim.second, seed) not in by_key:
            continue
        examples = [read_examples(run, seed) or {} for run in (claim.first, claim.second)]
        shared = [row for row in examples[0] if row in examples[1]]
        pair = [np.array([by_row[row][position] for row in shared], dtype=float) for by_row in examples]
        if not shared or not np.isfinite(pair).all():
            return None
        rows.append(shared)
        first.append(pair[0])
        second.append(pair[1])
    return bootstrap_interval(first, second, rows) if rows else None
