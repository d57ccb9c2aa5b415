"""The selection of the best setting of each run on validation examples.

`benchmark.sweep` gives each run several trials. With `benchmark.select`, the trials are evaluated on the validation
examples of the recipe, and the best trial gives the settings of the run on the test examples. No trial reads a test
example.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hf_federated.data.markdown_table import markdown_table
from hf_federated.experiments.benchmark.comparison import Record, is_lower_better, main_metric
from hf_federated.experiments.benchmark.grid import BenchmarkSection, PlannedRun
from hf_federated.experiments.benchmark.sweep import Trial, trials_of
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.text import plural


# Sections whose fields a selection must not vary, because they choose the examples.
_DATA_SECTIONS = ("data", "partition", "public", "task")
# Settings of a run on validation examples. It loads no test split.
_ON_VALIDATION = {"data.evaluate_on": "validation"}


def trial_section(section: BenchmarkSection) -> BenchmarkSection:
    """
    The section of the trials of a selection: runs on validation examples, under the seeds of the selection.

    Args:
        section ([`BenchmarkSection`]): The section `benchmark`, with `select`.

    Raises:
        CommandError: If a sweep varies the examples, or the runs have different numbers of trials.
    """
    trials = _tuned(section)
    counts = {run: sum(trial.run == run for trial in trials) for run in dict.fromkeys(trial.run for trial in trials)}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{run} {count}" for run, count in counts.items())
        raise CommandError(
            f"benchmark.select: the runs have different numbers of trials: {listed}. Give each run the same number."
        )
    if not counts:
        raise CommandError("benchmark.select is set without a sweep. Add benchmark.sweep, or a sweep of a run.")
    for trial in trials:
        for field in trial.setting:
            if field.partition(".")[0] in _DATA_SECTIONS:
                raise CommandError(
                    f"benchmark.select: {trial.run!r} varies {field}, which changes the examples. Scores on different"
                    " examples cannot be compared; vary fields of training, federation, model or split."
                )
    runs = {trial.name: {**trial.changes, **_ON_VALIDATION} for trial in trials}
    metric = section.selection.metric or section.metric
    return dataclasses.replace(
        section,
        runs=runs,
        seeds=section.selection.seeds,
        metric=metric,
        lower_is_better=section.lower_is_better if metric == section.metric else None,
        title=f"Trials of {section.title}" if section.title else "Trials",
        sweep={},
        select=None,
        further_metrics=[],
        paper={},
        paper_setting=None,
        target=None,
        claims=[],
        former_claims=[],
    )


def check_selection(run: PlannedRun) -> None:
    """
    Check that the settings of a run can be chosen on other examples than the test examples of all seeds.

    Args:
        run ([`~hf_federated.experiments.benchmark.grid.PlannedRun`]): A run of a recipe with `benchmark.select`.

    Raises:
        CommandError: If the run has no validation examples or no test split, or chooses a checkpoint by its score on
            the test examples.
    """
    data = _mapping(run.values.get("data"))
    if data.get("validation_split") is None and data.get("validation_examples") is None:
        raise CommandError(
            f"benchmark.select needs validation examples, but the run {run.name!r} has none. Set"
            " data.validation_examples to a share such as 0.1, or data.validation_split to a split."
        )
    if data.get("evaluate_on") is not None:
        raise CommandError(
            f"data.evaluate_on is set in the run {run.name!r} together with benchmark.select, which sets it for the"
            " trials. Remove it."
        )
    if data.get("test_split") is None and data.get("test_path") is None:
        raise CommandError(
            f"benchmark.select needs data.test_split or data.test_path, but the run {run.name!r} has neither. Test"
            " examples that are held out of the training examples depend on the seed, so the training examples of a"
            " trial can be test examples of another seed."
        )
    if _mapping(run.values.get("training")).get("load_best_model_at_end"):
        raise CommandError(
            f"training.load_best_model_at_end is set in the run {run.name!r} together with benchmark.select. It would"
            " choose a checkpoint by its score on the test examples. Remove it."
        )


def choose(section: BenchmarkSection, records: Sequence[Record]) -> dict[str, Trial]:
    """
    The trial with the best mean over the seeds of the selection, for each run whose trials are all finished.

    A trial that diverged is worse than any other trial. The first one of equal trials is chosen, also if all trials of
    a run diverged.

    Args:
        section ([`BenchmarkSection`]): The section `benchmark`, with `select`.
        records (`Sequence[Mapping]`): The records of finished trials.

    Returns:
        `dict[str, Trial]`: The chosen trial by the name of the run.
    """
    scores, trials = trial_scores(section, records), trial_section(section)
    converged = _converged(records)
    sign = -1.0 if converged and is_lower_better(converged, trials) else 1.0

    def rank(trial: Trial) -> float:
        score = scores[trial.name]
        return -math.inf if score is None else sign * score

    chosen: dict[str, Trial] = {}
    for trial in _tuned(section):
        own = [each for each in _tuned(section) if each.run == trial.run]
        if all(each.name in scores for each in own):
            chosen[trial.run] = max(own, key=rank)
    return chosen


def selected_section(section: BenchmarkSection, chosen: Mapping[str, Trial]) -> BenchmarkSection:
    """
    The section of the runs on test examples, with the chosen settings.

    Args:
        section ([`BenchmarkSection`]): The section `benchmark`, with `select`.
        chosen (`Mapping[str, Trial]`): The result of [`choose`]. Other runs keep the settings of the recipe.
    """
    runs = {trial.run: trial.changes for trial in trials_of(section.runs, section.sweep)}
    runs |= {run: trial.changes for run, trial in chosen.items()}
    return dataclasses.replace(section, runs=runs, sweep={}, select=None)


def waiting_runs(section: BenchmarkSection, chosen: Mapping[str, Trial]) -> set[str]:
    """The names of the runs whose trials are not finished."""
    return {trial.run for trial in _tuned(section)} - chosen.keys()


def trial_names(section: BenchmarkSection, only: Sequence[str] | None) -> list[str] | None:
    """The names of the trials of some runs, or `None` for all runs."""
    return None if only is None else [trial.name for trial in _tuned(section) if trial.run in only]


def trial_scores(section: BenchmarkSection, records: Sequence[Record]) -> dict[str, float | None]:
    """
    The mean score of each trial that is finished under all seeds of the selection, or `None` if it diverged.

    Args:
        section ([`BenchmarkSection`]): The section `benchmark`, with `select`.
        records (`Sequence[Mapping]`): The records of finished trials.
    """
    trials = trial_section(section)
    metric = main_metric(_converged(records), trials)
    scores: dict[str, float | None] = {}
    for name in trials.runs:
        own = {record["seed"]: record["metrics"].get(metric) for record in records if record["run"] == name}
        if set(trials.seeds) <= own.keys():
            values = [own[seed] for seed in trials.seeds]
            scores[name] = None if None in values else float(np.mean(values))
    return scores


def selection_report(section: BenchmarkSection, records: Sequence[Record]) -> list[str]:
    """
    The table of trials with the chosen settings, and its explanation, as paragraphs of Markdown.

    Args:
        section ([`BenchmarkSection`]): The section `benchmark`, with `select`.
        records (`Sequence[Mapping]`): The records of finished trials.
    """
    scores, chosen = trial_scores(section, records), choose(section, records)
    trials = trial_section(section)
    metric = main_metric(_converged(records), trials)
    rows = []
    for trial in _tuned(section):
        score = scores.get(trial.name)
        shown = f"{score:.4f}" if score is not None else "diverged" if trial.name in scores else "-"
        is_chosen = trial.run in chosen and chosen[trial.run] == trial
        rows.append([trial.name.replace("|", r"\|"), shown, "yes" if is_chosen else ""])
    per_run = len(_tuned(section)) // len({trial.run for trial in _tuned(section)})
    text = (
        f"The settings of each run were chosen from {plural(per_run, 'trial')} by {metric} on validation examples,"
        f" under {plural(len(trials.seeds), 'seed')} ({', '.join(map(str, trials.seeds))}). No trial read a test"
        " example."
    )
    report = ["### Selection", text, markdown_table(["trial", f"validation {metric}", "chosen"], rows, {0, 2})]
    at_edge = {run: _fields_at_edge(section, trial) for run, trial in chosen.items()}
    listed = ", ".join(f"{run} ({', '.join(fields)})" for run, fields in at_edge.items() if fields)
    if listed:
        report.append(
            f"The chosen value is the smallest or the largest of the trials for {listed}. A better value can be"
            " outside the trials."
        )
    return report


def _fields_at_edge(section: BenchmarkSection, chosen: Trial) -> list[str]:
    """The last names of the fields whose chosen number is the smallest or the largest one of the run's trials."""
    fields = []
    for field, value in chosen.setting.items():
        tried = {trial.setting[field] for trial in _tuned(section) if trial.run == chosen.run}
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in tried)
        if are_numbers and len(tried) > 1 and value in (min(tried), max(tried)):
            fields.append(field.rpartition(".")[2])
    return fields


def _tuned(section: BenchmarkSection) -> list[Trial]:
    """The trials of the runs that have a sweep."""
    return [trial for trial in trials_of(section.runs, section.sweep) if trial.setting]


def _converged(records: Sequence[Record]) -> list[Record]:
    """The records of trials that did not diverge."""
    return [record for record in records if not record.get("diverged")]


def _mapping(section: Any) -> Mapping[str, Any]:
    return section if isinstance(section, Mapping) else {}
