"""What a benchmark found, beside what was published: tables, claims and how far they can be compared.

Everything here is computed from the records of finished runs; nothing is read or run. A spread is the sample standard
deviation over seeds (`n - 1` in the denominator). With a handful of seeds it is rough, and nothing here is a test of
significance: a claim is said to hold if it holds on average and under every seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_federated.data.markdown_table import markdown_table
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.grid import BenchmarkSection
from hf_federated.reporting.learning_curves import CurvePanel


# A record of a run as `run_log` reads it.
Record = Mapping[str, Any]
# Of more clients a report has no columns.
MAX_CLIENT_COLUMNS = 12


@dataclass(frozen=True)
class Comparison:
    """
    A claim "A > B" over the seeds under which both were run.

    Args:
        differences (`list[float | None]`): By how much A was better, a seed each; `None` where one of them gave no
            finite value.
        verdict (`str`): `"holds"` if A is better on average and under every seed, `"mixed"` if on average only,
            `"does not hold"` if not on average, `"not measured"` without a difference.
    """

    differences: list[float | None]
    verdict: str

    @property
    def finite(self) -> list[float]:
        """The differences that there are."""
        return [difference for difference in self.differences if difference is not None]

    @property
    def num_agreeing(self) -> int:
        """Under how many seeds A was better."""
        return sum(difference > 0 for difference in self.finite)


def main_metric(records: Sequence[Record], section: BenchmarkSection) -> str:
    """
    The metric that is compared: that of the section, or else the one that the runs name.

    Raises:
        CommandError: If the runs name several, or a run has no such metric.
    """
    named = list(dict.fromkeys(record["metric"] for record in records))
    if section.metric is None and len(named) > 1:
        raise CommandError(f"benchmark.metric: the runs have several main metrics ({', '.join(named)}); name one.")
    metric = section.metric or (named[0] if named else "value")
    for record in records:
        if metric not in record["metrics"]:
            known = ", ".join(record["metrics"]) or "none"
            raise CommandError(f"benchmark.metric: {record['run']!r} has no {metric!r}; its metrics are {known}.")
    return metric


def is_lower_better(records: Sequence[Record], section: BenchmarkSection) -> bool:
    """Whether a smaller value is the better one: as the section says, or else the task of the main metric."""
    if section.lower_is_better is not None:
        return section.lower_is_better
    metric = main_metric(records, section)
    return any(record.get("lower_is_better", False) for record in records if record["metric"] == metric)


def values_by_run(
    records: Sequence[Record], section: BenchmarkSection, metric: str
) -> dict[str, dict[int, float | None]]:
    """
    Values of a metric: name of each run of the section to seed to value, which is `None` where it was not finite.
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
    Checks that one run is better than another, seed by seed.

    Args:
        better (`Mapping[int, float | None]`): Seed to value of the run that is said to be better.
        worse (`Mapping[int, float | None]`): The same of the other.
        lower_is_better (`bool`, *optional*, defaults to `False`): Whether a smaller value is the better one.

    Example:

    ```python
    >>> from hf_federated.experiments.report import compare

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
    comparison = Comparison(differences, "")
    if not comparison.finite:
        verdict = "not measured"
    elif np.mean(comparison.finite) <= 0:
        verdict = "does not hold"
    else:
        verdict = "holds" if comparison.num_agreeing == len(differences) else "mixed"
    return Comparison(differences, verdict)


def benchmark_report(records: Sequence[Record], section: BenchmarkSection, name: str) -> str:
    """
    The report of a benchmark as Markdown that reads well in a terminal too.

    Args:
        records (`Sequence[Record]`):
            One record of each finished run: those that [`~hf_federated.experiments.run_log.finished`] found.
        section ([`BenchmarkSection`]):
            What was planned.
        name (`str`):
            The recipe's file name.

    Raises:
        CommandError: As [`main_metric`] does.
    """
    metric = main_metric(records, section)
    values = values_by_run(records, section, metric)
    lower_is_better = is_lower_better(records, section)
    better = "lower" if lower_is_better else "higher"
    parts = [f"# {section.title or name}"]
    if section.paper_setting:
        parts.append(f"Published: {section.paper_setting}.")
    parts.append(
        f"Ours: `{name}`, seeds {', '.join(map(str, section.seeds))}; {metric}, {better} is better, as mean ± sample"
        " standard deviation over seeds (number of seeds)."
    )
    parts.append(_results_table(records, section, metric, values))
    parts += _notes(records, metric, values)
    parts += _further_tables(records, section, metric)
    if section.claims:
        parts.append(_claims_table(section, values, lower_is_better))
        parts.append(
            "A difference is by how much the first run of a claim is better; ours is paired, seed by seed, as mean ±"
            " sample standard deviation. A claim holds if the first is better on average and under every seed. This is"
            " no test of significance."
        )
    if records and (section.paper or section.paper_setting):
        parts.append(comparability(records))
    return "\n\n".join(parts) + "\n"


def comparability(records: Sequence[Record]) -> str:
    """How far the numbers can be compared with published ones."""
    scales = list(dict.fromkeys(record.get("scale") for record in records))
    if scales == ["paper"]:
        return (
            "Model, data and sizes are the paper's, but for what --set changed. Its client optimizer and learning"
            " rates are not all published, so small differences mean little."
        )
    named = [str(scale) for scale in scales if scale is not None]
    scale = f" ({'scale' if len(named) == 1 else 'scales'} {', '.join(named)})" if named else ""
    return (
        f"The numbers are not comparable with the paper's: another model, other or fewer rows{scale}. What can be"
        " compared is the order of the methods."
    )


def curve_panel(records: Sequence[Record], section: BenchmarkSection, name: str) -> CurvePanel | None:
    """
    The learning curves of a benchmark, or `None` if no run has logged any.

    Args:
        records (`Sequence[Record]`): As in [`benchmark_report`].
        section ([`BenchmarkSection`]): What was planned.
        name (`str`): The recipe's file name.
    """
    metric = main_metric(records, section)
    curves: dict[str, list[dict[int, float | None]]] = {}
    references: dict[str, list[float | None]] = {}
    for run in section.runs:
        for record in records:
            if record["run"] != run:
                continue
            if record["method"] != "federated":
                references.setdefault(run, []).append(record["metrics"][metric])
                continue
            curve = {entry["round"]: entry[metric] for entry in record["history"] if entry.get(metric) is not None}
            if curve:
                curves.setdefault(run, []).append(curve)
    steps = " or ".join(step_names(records))
    return CurvePanel(section.title or name, metric, curves, references, steps) if curves else None


def step_names(records: Sequence[Record]) -> list[str]:
    """What the runs count: `"round"`, or `"optimizer step"` of split models. A record of before these has no name."""
    names = [record.get("step_name") or "round" for record in records if record["method"] == "federated"]
    return list(dict.fromkeys(names)) or ["round"]


def _results_table(
    records: Sequence[Record],
    section: BenchmarkSection,
    metric: str,
    values: Mapping[str, Mapping[int, float | None]],
) -> str:
    rows = []
    for run, by_seed in values.items():
        made = [record for record in records if record["run"] == run]
        finite = [value for value in by_seed.values() if value is not None]
        num_seeds = len(section.seeds)
        count = str(num_seeds) if len(finite) == num_seeds else f"{len(finite)} of {num_seeds}"
        bytes_up = _mean(made, "bytes_up")
        rows.append(
            [
                run,
                f"{_mean_and_spread(finite)} ({count})" if finite else "-",
                _number(section.paper[run]) if run in section.paper else "-",
                _or_dash(_mean(made, "num_epochs"), ".2f"),
                _or_dash(None if bytes_up is None else bytes_up / 1e6, ".1f"),
                _or_dash(_mean(made, "num_rounds"), "g"),
                _or_dash(_mean(made, "seconds"), ".0f"),
            ]
        )
    steps = " or ".join(f"{name}s" for name in step_names(records))
    header = ["run", metric.replace("|", r"\|"), "paper", "passes over a row", "MB up", steps, "seconds"]
    return markdown_table(header, rows, text_columns={0})


def _further_tables(records: Sequence[Record], section: BenchmarkSection, metric: str) -> list[str]:
    """Tables of further rows that models were tested on: those of named splits, and each client's own."""
    parts = []
    splits = _names_in(records, "further_tests")
    if splits:
        found = {own: _values_by_name(records, own, "further_tests", metric) for own in section.runs}
        parts += ["The same models on further rows, by split:", _columns_table(found, splits)]
    clients = _names_in(records, "clients")
    if clients:
        title = "On each client's own test rows, by its own model, or by the one that all have"
        found = {own: _values_by_name(records, own, "clients", metric) for own in section.runs}
        # Numbers are those of a partition that each seed draws anew: they name no client.
        if len(clients) <= MAX_CLIENT_COLUMNS and not all(own.isdecimal() for own in clients):
            parts += [f"{title}:", _columns_table(found, clients)]
        else:
            parts += [f"{title}, of the clients of a run:", _columns_table(_extremes(found), list(_EXTREMES))]
    return parts


_EXTREMES: dict[str, Callable[[list[float]], float]] = {"lowest": min, "median": statistics.median, "highest": max}
# By run and then seed: values by split or client.
_Found = Mapping[str, Sequence[Mapping[str, float | None]]]


def _names_in(records: Sequence[Record], field: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.get(field) or {}))


def _values_by_name(records: Sequence[Record], run: str, field: str, metric: str) -> list[dict[str, float | None]]:
    made = [record.get(field) or {} for record in records if record["run"] == run]
    return [{name: values.get(metric) for name, values in own.items()} for own in made]


def _extremes(found: _Found) -> dict[str, list[dict[str, float | None]]]:
    """Of the clients of each run and seed, the lowest value, the one in the middle and the highest."""
    finite = {run: [[v for v in own.values() if v is not None] for own in made] for run, made in found.items()}
    return {
        run: [{name: of(values) for name, of in _EXTREMES.items()} for values in made if values]
        for run, made in finite.items()
    }


def _columns_table(found: _Found, columns: Sequence[str]) -> str:
    """Runs as rows, each value a mean over seeds."""
    rows = []
    for run, made in found.items():
        values = [[value for own in made if (value := own.get(name)) is not None] for name in columns]
        if any(values):
            rows.append([run, *(_mean_and_spread(own) if own else "-" for own in values)])
    return markdown_table(["run", *(name.replace("|", r"\|") for name in columns)], rows, text_columns={0})


def _claims_table(
    section: BenchmarkSection, values: Mapping[str, Mapping[int, float | None]], lower_is_better: bool
) -> str:
    rows = []
    for better, worse in section.orderings:
        comparison = compare(values[better], values[worse], lower_is_better)
        paper = "-"
        if better in section.paper and worse in section.paper:
            difference = section.paper[better] - section.paper[worse]
            paper = _number(-difference if lower_is_better else difference, signed=True)
        missing = len(section.seeds) - len(comparison.differences)
        rows.append(
            [
                f"{better} > {worse}",
                paper,
                _mean_and_spread(comparison.finite, signed=True) if comparison.finite else "-",
                f"{comparison.num_agreeing} of {len(comparison.differences)}"
                + (f", {missing} missing" if missing else ""),
                comparison.verdict + (" so far" if missing and comparison.differences else ""),
            ]
        )
    header = ["claim", "paper's difference", "our difference", "seeds that agree", "verdict"]
    return markdown_table(header, rows, text_columns={0, 3, 4})


def _notes(records: Sequence[Record], metric: str, values: Mapping[str, Mapping[int, float | None]]) -> list[str]:
    """What a reader of the table has to know of its runs."""
    notes = []
    lost = [
        f"{run}, seed {seed}" for run, by_seed in values.items() for seed, value in by_seed.items() if value is None
    ]
    if lost:
        notes.append(f"Without a finite {metric}, and so in no mean: {'; '.join(lost)}.")
    taken = dict.fromkeys(f"{r['run']} ({r['taken_from']})" for r in records if r.get("taken_from"))
    if taken:
        notes.append(f"Runs of other recipes, which have the same settings: {'; '.join(taken)}.")
    failed = [f"{r['run']}, seed {r['seed']} ({r['num_failed']})" for r in records if r.get("num_failed")]
    if failed:
        notes.append(f"With updates that failed or were refused: {'; '.join(failed)}.")
    for seed in sorted({record["seed"] for record in records}):
        made = [record for record in records if record["seed"] == seed]
        hashes: dict[str, set[str]] = {}
        for record in made:  # of which older ones may say nothing of further rows
            for split, rows in {"": record.get("test_rows"), **(record.get("further_rows") or {})}.items():
                hashes.setdefault(split, set()).update([rows] if rows else [])
        if any(len(own) > 1 for own in hashes.values()):
            notes.append(f"Under seed {seed} the runs were tested on different rows; their differences mean little.")
    packages = {name for record in records for name in record.get("versions", {})}
    for package in sorted(packages):
        versions = sorted({str(record.get("versions", {}).get(package, "unknown")) for record in records})
        if len(versions) > 1:
            notes.append(f"The runs were made with different versions of {package}: {', '.join(versions)}.")
    return notes


def _mean(records: Sequence[Record], name: str) -> float | None:
    """The mean of a field, unless a record is without it."""
    values = [record.get(name) for record in records]
    return float(np.mean([value for value in values if value is not None])) if values and None not in values else None


def _mean_and_spread(values: Sequence[float], signed: bool = False) -> str:
    spread = f" ± {_number(float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
    return f"{_number(float(np.mean(values)), signed)}{spread}"


def _number(value: float, signed: bool = False) -> str:
    """Four decimals, as tables of accuracies have; two from ten on, for percentages and perplexities."""
    return format(value, ("+" if signed else "") + (".4f" if abs(value) < 10 else ".2f"))


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
