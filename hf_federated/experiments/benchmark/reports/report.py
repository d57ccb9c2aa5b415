"""Reports of a benchmark: tables of results next to published results, and checks of claims.

All values are computed from the records of finished runs. A spread is the sample standard deviation over seeds (`n -
1` in the denominator). `claims_table.py` writes the table of claims.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hf_federated.data.markdown_table import markdown_table
from hf_federated.experiments.benchmark.comparison import (
    Record,
    has_only_fallbacks,
    is_lower_better,
    main_metric,
    step_names,
    values_by_run,
)
from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.benchmark.reports.claims_table import claims_report
from hf_federated.experiments.benchmark.reports.communication import communication_report
from hf_federated.experiments.benchmark.reports.verdicts import ReadExamples, number
from hf_federated.reporting.learning_curves import CurvePanel


# Maximum number of clients for a table with one column per client.
MAX_CLIENT_COLUMNS = 12
# Metrics that the table of results shows after the score and the further metrics, if the runs have them.
LOSSES = ("loss", "calibrated_loss")


def benchmark_report(
    records: Sequence[Record], section: BenchmarkSection, name: str, read_examples: ReadExamples | None = None
) -> str:
    """
    The report of a benchmark as Markdown, with aligned tables that are also readable in a terminal.

    A run of [`~hf_federated.AdaFD`] whose language model returned no weights in any round is left out, because it has
    the weights of another run.

    Args:
        records (`Sequence[Mapping]`):
            One record per finished run, as found by [`~hf_federated.experiments.benchmark.run_log.find_finished`].
        section ([`BenchmarkSection`]):
            The section `benchmark`.
        name (`str`):
            File name of the recipe.
        read_examples (`Callable`, *optional*):
            Reads the predictions of a run, as in
            [`~hf_federated.experiments.benchmark.reports.verdicts.evaluate_claims`]. With the predictions, the table
            of claims has an interval over test examples.

    Raises:
        CommandError: If [`main_metric`] cannot determine the metric.
    """
    fallbacks = [record for record in records if has_only_fallbacks(record)]
    records = [record for record in records if not has_only_fallbacks(record)]
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
    if fallbacks:
        names = "; ".join(f"{record['run']}, seed {record['seed']}" for record in fallbacks)
        parts.append(f"Runs left out, because their language model returned no weights in any round: {names}.")
    parts += _further_tables(records, section, metric)
    parts += claims_report(records, section, read_examples)
    parts += communication_report(records, section, metric)
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
            if record["run"] != run or has_only_fallbacks(record):
                continue
            if record["method"] != "federated":
                references.setdefault(run, []).append(record["metrics"][metric])
                continue
            curve = {entry["round"]: entry[metric] for entry in record["history"] if entry.get(metric) is not None}
            if curve:
                curves.setdefault(run, []).append(curve)
    steps = " or ".join(step_names(records))
    return CurvePanel(section.title or name, metric, curves, references, steps) if curves else None


def _results_table(
    records: Sequence[Record],
    section: BenchmarkSection,
    metric: str,
    values: Mapping[str, Mapping[int, float | None]],
) -> str:
    recorded = {name for record in records for name in record["metrics"]}
    # The loss accompanies the score in every report.
    losses = [name for name in LOSSES if name in recorded and name not in (metric, *section.further_metrics)]
    further = [*section.further_metrics, *losses]
    rows = []
    for run, by_seed in values.items():
        own_records = [record for record in records if record["run"] == run]
        finite = [value for value in by_seed.values() if value is not None]
        num_seeds = len(section.seeds)
        count = str(num_seeds) if len(finite) == num_seeds else f"{len(finite)} of {num_seeds}"
        rows.append(
            [
                run,
                f"{_mean_and_spread(finite)} ({count})" if finite else "-",
                *(_mean_and_spread(record["metrics"].get(name) for record in own_records) for name in further),
                number(section.paper[run]) if run in section.paper else "-",
                _mean(own_records, "num_epochs", ".2f"),
                *(_megabytes(own_records, name) for name in ("bytes_up", "bytes_down")),
                _mean(own_records, "num_rounds", "g"),
                _mean(own_records, "seconds", ".0f"),
            ]
        )
    steps = " or ".join(f"{name}s" for name in step_names(records))
    metrics = [name.replace("|", r"\|") for name in (metric, *further)]
    header = ["run", *metrics, "paper", "epochs", "MB up", "MB down", steps, "seconds"]
    return markdown_table(header, rows, text_columns={0})


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
        cells = [_mean_and_spread(by_name.get(name) for by_name in by_seed) for name in columns]
        if set(cells) != {"-"}:
            rows.append([run, *cells])
    return markdown_table(["run", *(name.replace("|", r"\|") for name in columns)], rows, text_columns={0})


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
    scripts = list(dict.fromkeys(record["prepared_by"] for record in records if record.get("prepared_by")))
    if scripts:
        notes.append(f"Scripts that prepared the examples: {', '.join(f'`{script}`' for script in scripts)}.")
    packages = {name for record in records for name in record.get("versions", {})}
    for package in sorted(packages):
        versions = sorted({str(record.get("versions", {}).get(package, "unknown")) for record in records})
        if len(versions) > 1:
            notes.append(f"The runs used different versions of {package}: {', '.join(versions)}.")
    return notes


def _mean(records: Sequence[Record], name: str, spec: str, unit: float = 1.0) -> str:
    """The formatted mean of a field, or `-` if there are no records or a record does not have the field."""
    values: list[Any] = [record.get(name) for record in records]
    return "-" if not values or None in values else format(float(np.mean(values)) / unit, spec)


def _megabytes(records: Sequence[Record], name: str) -> str:
    """The mean of the finished runs in MB with three significant digits, or `-`."""
    values = [record.get(name) for record in records]
    given = [value for value in values if value is not None]
    if not given or len(given) < len(values):
        return "-"
    mean = float(np.mean(given)) / 1e6
    rounded = format(mean, "#.3g").rstrip(".")
    return rounded if mean < 999.5 else f"{float(rounded):.0f}"


def _mean_and_spread(values: Iterable[float | None]) -> str:
    """The mean and the spread of the finite values, or `-` if there are none."""
    finite = [value for value in values if value is not None]
    if not finite:
        return "-"
    spread = f" ± {number(float(np.std(finite, ddof=1)))}" if len(finite) > 1 else ""
    return f"{number(float(np.mean(finite)))}{spread}"
