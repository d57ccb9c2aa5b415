"""Reports of a benchmark: tables of results next to published results, and checks of claims.

All values are computed from the records of finished runs. A spread is the sample standard deviation over seeds (`n -
1` in the denominator). With few seeds the spread is only a rough estimate, and the report contains no significance
test: a claim holds if it holds on average and under every seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_federated.data.markdown_table import markdown_table
from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.errors import CommandError
from hf_federated.reporting.learning_curves import CurvePanel


# A record of a run, as read by `run_log`.
Record = Mapping[str, Any]
# Maximum number of clients for a table with one column per client.
MAX_CLIENT_COLUMNS = 12


@dataclass(frozen=True)
class Comparison:
    """
    Result of a claim "A > B" over the seeds that both runs have.

    Args:
        differences (`list[float | None]`): For each seed, the difference between A and B, positive if A is better.
            `None` if a value is not finite.
        verdict (`str`): `"holds"` if A is better on average and under every seed, `"mixed"` if A is better only on
            average, `"does not hold"` if A is not better on average, `"not measured"` if there is no finite
            difference.
    """

    differences: list[float | None]
    verdict: str

    @property
    def finite(self) -> list[float]:
        """The finite differences."""
        return [difference for difference in self.differences if difference is not None]

    @property
    def num_agreeing(self) -> int:
        """Number of seeds under which A is better."""
        return sum(difference > 0 for difference in self.finite)


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
    >>> from hf_federated.experiments.benchmark.report import compare

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
    The report of a benchmark as Markdown, with aligned tables that are also readable in a terminal.

    Args:
        records (`Sequence[Mapping]`):
            One record per finished run, as found by [`~hf_federated.experiments.benchmark.run_log.find_finished`].
        section ([`BenchmarkSection`]):
            The section `benchmark`.
        name (`str`):
            File name of the recipe.

    Raises:
        CommandError: If [`main_metric`] cannot determine the metric.
    """
    metric = main_metric(records, section)
    values = values_by_run(records, section, metric)
    lower_is_better = is_lower_better(records, section)
    better = "lower" if lower_is_better else "higher"
    parts = [f"# {section.title or name}"]
    if section.paper_setting:
        parts.append(f"Setting of the published results: {section.paper_setting}.")
    parts.append(
        f"Setting of these results: `{name}`, seeds {', '.join(map(str, section.seeds))}. The table shows {metric}"
        f" ({better} is better) as mean ± sample standard deviation over seeds (number of seeds)."
    )
    parts.append(_results_table(records, section, metric, values))
    parts += _notes(records, metric, values)
    parts += _further_tables(records, section, metric)
    if section.claims:
        parts.append(_claims_table(section, values, lower_is_better))
        parts.append(
            "A difference is positive if the first run of a claim is better. The measured difference is paired by"
            " seed, as mean ± sample standard deviation. A claim holds if the first run is better on average and under"
            " every seed. This is not a test of significance."
        )
    if records and (section.paper or section.paper_setting):
        parts.append(comparability_note(records))
    return "\n\n".join(parts) + "\n"


def comparability_note(records: Sequence[Record]) -> str:
    """A sentence that states how far the results are comparable with the published results."""
    scales = list(dict.fromkeys(record.get("scale") for record in records))
    if scales == ["paper"]:
        return (
            "Model, data and sizes are those of the paper, except for changes by --set. The paper does not publish all"
            " client optimizers and learning rates, so small differences mean little."
        )
    scale_names = [str(scale) for scale in scales if scale is not None]
    scale = f" ({'scale' if len(scale_names) == 1 else 'scales'} {', '.join(scale_names)})" if scale_names else ""
    return (
        f"The results are not comparable with the results of the paper: the model and the data differ{scale}. Only the"
        " order of the methods can be compared."
    )


def curve_panel(records: Sequence[Record], section: BenchmarkSection, name: str) -> CurvePanel | None:
    """
    The learning curves of a benchmark, or `None` if no run logged the metric.

    Args:
        records (`Sequence[Mapping]`): One record per finished run.
        section ([`BenchmarkSection`]): The section `benchmark`.
        name (`str`): File name of the recipe.
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
    """The units of the runs' steps: `"round"`, or `"optimizer step"` for split models. Old records have no unit."""
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
        own_records = [record for record in records if record["run"] == run]
        finite = [value for value in by_seed.values() if value is not None]
        num_seeds = len(section.seeds)
        count = str(num_seeds) if len(finite) == num_seeds else f"{len(finite)} of {num_seeds}"
        bytes_up = _mean(own_records, "bytes_up")
        rows.append(
            [
                run,
                f"{_mean_and_spread(finite)} ({count})" if finite else "-",
                *_columns(own_records, section.further_metrics),
                _number(section.paper[run]) if run in section.paper else "-",
                _or_dash(_mean(own_records, "num_epochs"), ".2f"),
                _or_dash(None if bytes_up is None else bytes_up / 1e6, ".1f"),
                _or_dash(_mean(own_records, "num_rounds"), "g"),
                _or_dash(_mean(own_records, "seconds"), ".0f"),
            ]
        )
    steps = " or ".join(f"{name}s" for name in step_names(records))
    metrics = [name.replace("|", r"\|") for name in (metric, *section.further_metrics)]
    header = ["run", *metrics, "paper", "epochs", "MB up", steps, "seconds"]
    return markdown_table(header, rows, text_columns={0})


def _columns(records: Sequence[Record], metrics: Sequence[str]) -> list[str]:
    """Cells with the mean and the spread of further metrics over the records of a run."""
    cells = []
    for name in metrics:
        finite = [value for record in records if (value := record["metrics"][name]) is not None]
        cells.append(_mean_and_spread(finite) if finite else "-")
    return cells


def _further_tables(records: Sequence[Record], section: BenchmarkSection, metric: str) -> list[str]:
    """Tables of the metric on additional test splits, and on the test examples of each client."""
    parts = []
    splits = _names_in(records, "further_tests")
    if splits:
        values = {run: _values_by_name(records, run, "further_tests", metric) for run in section.runs}
        parts += ["The same models on additional test splits:", _columns_table(values, splits)]
    clients = _names_in(records, "clients")
    if clients:
        title = "On the test examples of each client, evaluated with its own model or with the shared model"
        values = {run: _values_by_name(records, run, "clients", metric) for run in section.runs}
        # A partitioner numbers the clients, and client "1" under one seed is not client "1" under the next seed.
        if len(clients) <= MAX_CLIENT_COLUMNS and not all(client_id.isdecimal() for client_id in clients):
            parts += [f"{title}:", _columns_table(values, clients)]
        else:
            parts += [f"{title}, over the clients of a run:", _columns_table(_extremes(values), list(_EXTREMES))]
    return parts


_EXTREMES: dict[str, Callable[[list[float]], float]] = {"lowest": min, "median": statistics.median, "highest": max}
# Maps a run to one mapping per seed, which maps a split or client to a value.
_RunValues = Mapping[str, Sequence[Mapping[str, float | None]]]


def _names_in(records: Sequence[Record], field: str) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.get(field) or {}))


def _values_by_name(records: Sequence[Record], run: str, field: str, metric: str) -> list[dict[str, float | None]]:
    fields = [record.get(field) or {} for record in records if record["run"] == run]
    return [{name: metrics.get(metric) for name, metrics in by_name.items()} for by_name in fields]


def _extremes(values: _RunValues) -> dict[str, list[dict[str, float | None]]]:
    """For each run and seed, the lowest, median and highest value over the clients."""
    finite = {
        run: [[value for value in by_client.values() if value is not None] for by_client in by_seed]
        for run, by_seed in values.items()
    }
    return {
        run: [{name: function(numbers) for name, function in _EXTREMES.items()} for numbers in by_seed if numbers]
        for run, by_seed in finite.items()
    }


def _columns_table(values: _RunValues, columns: Sequence[str]) -> str:
    """A table with one row per run, with means over seeds."""
    rows = []
    for run, by_seed in values.items():
        cells = [[value for by_name in by_seed if (value := by_name.get(name)) is not None] for name in columns]
        if any(cells):
            rows.append([run, *(_mean_and_spread(numbers) if numbers else "-" for numbers in cells)])
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
    header = ["claim", "published difference", "measured difference", "seeds in agreement", "verdict"]
    return markdown_table(header, rows, text_columns={0, 3, 4})


def _notes(records: Sequence[Record], metric: str, values: Mapping[str, Mapping[int, float | None]]) -> list[str]:
    """Notes on runs that limit the interpretation of the table."""
    notes = []
    not_finite = [
        f"{run}, seed {seed}" for run, by_seed in values.items() for seed, value in by_seed.items() if value is None
    ]
    if not_finite:
        notes.append(f"Runs without a finite {metric}, which are excluded from the means: {'; '.join(not_finite)}.")
    reused = dict.fromkeys(f"{r['run']} ({r['taken_from']})" for r in records if r.get("taken_from"))
    if reused:
        notes.append(f"Runs reused from other recipes with the same settings: {'; '.join(reused)}.")
    failed = [f"{r['run']}, seed {r['seed']} ({r['num_failed']})" for r in records if r.get("num_failed")]
    if failed:
        notes.append(f"Runs with failed or rejected updates: {'; '.join(failed)}.")
    for seed in sorted({record["seed"] for record in records}):
        seed_records = [record for record in records if record["seed"] == seed]
        hashes: dict[str, set[str]] = {}
        for record in seed_records:
            # Old records do not contain `further_rows`.
            for split, digest in {"": record.get("test_rows"), **(record.get("further_rows") or {})}.items():
                hashes.setdefault(split, set()).update([digest] if digest else [])
        if any(len(digests) > 1 for digests in hashes.values()):
            notes.append(
                f"Under seed {seed} the runs were tested on different examples, so their differences mean little."
            )
    packages = {name for record in records for name in record.get("versions", {})}
    for package in sorted(packages):
        versions = sorted({str(record.get("versions", {}).get(package, "unknown")) for record in records})
        if len(versions) > 1:
            notes.append(f"The runs used different versions of {package}: {', '.join(versions)}.")
    return notes


def _mean(records: Sequence[Record], name: str) -> float | None:
    """The mean of a field, or `None` if there are no records or a record does not have the field."""
    values = [record.get(name) for record in records]
    return float(np.mean([value for value in values if value is not None])) if values and None not in values else None


def _mean_and_spread(values: Sequence[float], signed: bool = False) -> str:
    spread = f" ± {_number(float(np.std(values, ddof=1)))}" if len(values) > 1 else ""
    return f"{_number(float(np.mean(values)), signed)}{spread}"


def _number(value: float, signed: bool = False) -> str:
    """Format with four decimals (accuracies), or with two decimals from 10 on (percentages and perplexities)."""
    return format(value, ("+" if signed else "") + (".4f" if abs(value) < 10 else ".2f"))


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
