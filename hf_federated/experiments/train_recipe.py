"""`hf-federated train`: a recipe from its data to a model, its card, its plots and a closing table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_federated.cards import RunRecord, SplitRecord
from hf_federated.data import label_counts, plot_sizes
from hf_federated.experiments.baselines import BaselineResult
from hf_federated.experiments.execution import Run, build_run, run_baseline, run_federated
from hf_federated.experiments.recipe import Recipe
from hf_federated.experiments.run_log import finite
from hf_federated.reporting.run_plots import plot_learning_curve, plot_partition
from hf_federated.tasks import (
    SequenceTagging,
    SuperGlueClassification,
    SuperGlueCloze,
    SuperGlueSeq2Seq,
    TextClassification,
)


RESULTS_NAME = "results.json"
# What the card is rendered from.
RECORD_NAME = "run_record.json"


def train_recipe(recipe: Recipe, output_dir: str | None = None, echo: Callable[[str], None] = print) -> dict[str, Any]:
    """
    Runs a recipe: baselines, federation, model, card, plots and closing table.

    Args:
        recipe ([`Recipe`]): The recipe.
        output_dir (`str`, *optional*): Instead of the recipe's `training.output_dir`.
        echo (`Callable`, *optional*): Prints a line.

    Returns:
        `dict`: The content of `results.json`.

    Raises:
        RecipeError: Before anything is trained, if the recipe cannot be run.
    """
    run = build_run(recipe, output_dir)
    for line in run.describe():
        echo(line)
    baselines = _train_baselines(run, echo)
    if recipe.split is not None:
        echo(f"Split (epochs: {run.federation.num_rounds}; the bar and the logs count optimizer steps):")
    else:
        echo(f"Federated (rounds: {run.federation.num_rounds}; so count the bar and the logs):")
    federated = run_federated(run)
    raw = run.inputs.raw
    held_out = raw.test_clients if recipe.data.test_split is None else None
    results = {
        "metric": run.metric,
        "lower_is_better": run.inputs.task.lower_is_better,
        "num_train_clients": len(raw.train),
        "num_train_rows": sum(raw.train.num_rows.values()),
        "num_test_clients": None if held_out is None else len(held_out),
        "num_test_rows": len(raw.test),
        # Of a split model; what it came to stands under `federated` as of every other run.
        "strategy": None if recipe.split is None else run.trainer.split.strategy,
        "baselines": {result.name: vars(result) for result in baselines},
        "federated": federated,
    }
    folder = Path(str(run.trainer.args.output_dir))
    run.trainer.save_model()
    (folder / RESULTS_NAME).write_text(json.dumps(finite(results), indent=2) + "\n", encoding="utf-8")
    run.trainer.create_model_card(**recipe.card)
    record: Any = RunRecord if recipe.split is None else SplitRecord
    record.from_trainer(run.trainer, **recipe.card).save(folder / RECORD_NAME)
    if recipe.plots:
        _plot(run, folder, baselines)
    echo("")
    for line in closing_table(results):
        echo(line)
    echo(f"\nModel, card (README.md), {RESULTS_NAME}{' and plots' if recipe.plots else ''} are in {folder}.")
    return results


def _train_baselines(run: Run, echo: Callable[[str], None]) -> list[BaselineResult]:
    results = []
    if "centralized" in run.recipe.compare:
        echo(f"Centralized ({run.baselines.centralized_epochs:.3g} passes over all training rows):")
        results.append(run_baseline(run, "centralized"))
    if "local" in run.recipe.compare:
        wanted = run.recipe.local_clients or len(run.inputs.train)
        echo(f"Local only ({min(wanted, len(run.inputs.train))} clients, each alone):")
        results.append(run_baseline(run, "local", echo))
    return results


def closing_table(results: dict[str, Any]) -> list[str]:
    """
    The lines that a run ends with.

    Args:
        results (`dict`): The content of `results.json`.
    """
    federated, metric = results["federated"], results["metric"]
    title = metric.replace("_", " ")
    rows = [("", title, "passes/row", "bytes up", "bytes down", "seconds")]
    labels = {"centralized": "centralized", "local": "local-only (mean of {})"}
    strategy = results.get("strategy")
    own = "federated" if strategy is None else f"split ({strategy})"
    for name, result in results["baselines"].items():
        spread = f" ±{result['spread'][metric]:.3f}" if result["spread"] else ""
        rows.append(
            (
                labels[name].format(result["num_clients"]),
                f"{result['metrics'][metric]:.3f}{spread}",
                f"{result['num_epochs']:.2f}",
                "-",
                "-",
                f"{result['seconds']:.0f}",
            )
        )
    rows.append(
        (
            own,
            f"{federated['metrics'][metric]:.3f}",
            f"{federated['num_epochs']:.2f}",
            _megabytes(federated["bytes_up"]),
            _megabytes(federated["bytes_down"]),
            f"{federated['seconds']:.0f}",
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    of_clients = "" if results["num_test_clients"] is None else f" of {results['num_test_clients']} held-out clients"
    lines = [
        f"{title[0].upper()}{title[1:]} on the same {results['num_test_rows']} rows{of_clients}:",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    for split, found in federated.get("further_tests", {}).items():
        lines.append(f"{own} on the split {split}: {found[metric]:.3f}")
    for name, result in results["baselines"].items():
        difference = federated["metrics"][metric] - result["metrics"][metric]
        # Metrics where less is better are no shares of 1.
        said = f"{difference:+.2f}" if results["lower_is_better"] else f"{100 * difference:+.1f} points"
        lines.append(f"{own} minus {labels[name].partition(' ')[0]}: {said}")
    return lines


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _plot(run: Run, folder: Path, baselines: list[BaselineResult]) -> None:
    clients, task = run.inputs.raw.train, run.inputs.task
    column = None
    if isinstance(task, TextClassification):
        column = task.label_column
    elif isinstance(task, SequenceTagging):
        column = task.tags_column
    elif isinstance(task, (SuperGlueClassification, SuperGlueSeq2Seq)):
        column = "task"  # as figure 3 of FedDRS
    elif isinstance(task, SuperGlueCloze):
        # Of one task its labels, as figure 5 of FL-GLM.
        column = "task" if len(run.inputs.raw.test.unique("task")) > 1 else task.label_column
    if column is not None:
        counts = label_counts(clients, column)
        by_client = dict(zip(counts.client_ids, counts.counts.tolist(), strict=True))
        plot_partition(by_client, folder / "partition.png", label_names=counts.label_names)
    else:
        plot_sizes(list(clients.num_rows.values()), folder / "partition.png")
    names = {"local": "local-only"}
    plot_learning_curve(
        run.trainer.state.log_history,
        folder / "learning_curve.png",
        metric=f"eval_{run.metric}",
        references={names.get(item.name, item.name): item.metrics[run.metric] for item in baselines},
        step_name=run.step_name,
    )
