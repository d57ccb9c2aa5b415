"""Train a recipe with its baselines, and write the model, model card, results, plots and a table of results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hf_federated.cards import RunRecord, SplitRecord
from hf_federated.cards.comparison_text import comparison_differences, comparison_heading, comparison_rows
from hf_federated.cards.payload_leakage import add_payload_audit
from hf_federated.cards.tables import plural
from hf_federated.data import label_counts, plot_sizes
from hf_federated.experiments.audit.recipe_audit import audit_recipe, check_packages
from hf_federated.experiments.baselines import BaselineResult
from hf_federated.experiments.data.checked_clients import recipe_lines
from hf_federated.experiments.data.label_encoding import label_column
from hf_federated.experiments.execution import Run, build_run, run_baseline, run_federated
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.run_folder import RESULTS_NAME, RunFolder
from hf_federated.experiments.strict_json import to_strict_json
from hf_federated.experiments.text import aligned_rows
from hf_federated.reporting.anomaly_plots import plot_anomalies
from hf_federated.reporting.run_plots import plot_learning_curve, plot_partition
from hf_federated.server import load_anomalies
from hf_federated.server.anomaly_report import ANOMALIES_NAME
from hf_federated.tasks import SuperGlueClassification, SuperGlueCloze, SuperGlueSeq2Seq
from hf_federated.trainer.checkpoint import size_of_trained
from hf_federated.trainer.output_lock import output_dir_lock
from hf_federated.utils.storage import storage_errors


# The data from which the model card is rendered.
RECORD_NAME = "run_record.json"
# The results of the section `audit`.
AUDIT_NAME = "audit.json"


def train_recipe(
    recipe: Recipe,
    output_dir: str | None = None,
    echo: Callable[[str], None] = print,
    folder: RunFolder | None = None,
) -> dict[str, Any]:
    """
    Train the baselines and the federation of a recipe, save all outputs and print a table of results.

    Args:
        recipe ([`Recipe`]): The recipe.
        output_dir (`str`, *optional*): Overrides `training.output_dir` of the recipe.
        echo (`Callable`, *optional*): Prints a line.
        folder ([`~hf_federated.experiments.run_folder.RunFolder`], *optional*): The output folder, which determines
            whether the run resumes. By default, the run does not resume and does not delete the files of other runs.

    Returns:
        `dict`: The content of `results.json`.

    Raises:
        CommandError: If the recipe cannot be run. The error is raised before training starts.
        CheckpointError: If a file of the checkpoint to resume from is damaged. The error is raised before training
            starts.
        OutputDirInUseError: If another process trains in the output folder.
    """
    if recipe.audit is not None:
        check_packages()
    run = build_run(recipe, output_dir)
    for line in [*run.describe(), *recipe_lines(recipe, run.data.raw)]:
        echo(line)
    with output_dir_lock(str(run.trainer.args.output_dir)):
        return _train_run(run, echo, folder)


def _train_run(run: Run, echo: Callable[[str], None], folder: RunFolder | None) -> dict[str, Any]:
    """Train the baselines and the federation of a run, and save all outputs."""
    recipe = run.recipe
    if folder is not None:
        run.trainer.args.resume_from_checkpoint = folder.begin() or run.trainer.args.resume_from_checkpoint
    baselines = _train_baselines(run, echo, folder)
    if run.trainer.args.resume_from_checkpoint and folder is not None:
        echo(f"The run resumes from {folder.last_checkpoint}.")
    if recipe.split is not None:
        echo(f"Split model ({plural(run.num_rounds, 'epoch')}; the progress bar and the logs count optimizer steps):")
    else:
        echo(f"Federated ({plural(run.num_rounds, 'round')}; the progress bar and the logs count rounds):")
    federated = run_federated(run)
    raw = run.data.raw
    held_out = raw.test_clients if raw.holds_out_clients else None
    results = {
        "metric": run.metric,
        "lower_is_better": run.data.task.lower_is_better,
        "num_train_clients": len(raw.train),
        "num_train_rows": sum(raw.train.num_rows.values()),
        "num_test_clients": None if held_out is None else len(held_out),
        "num_test_rows": len(raw.test),
        "test_source": f"{len(raw.test)} examples{raw.test_source}",
        # Only for a split model. Its results are under `federated`, as for all runs.
        "strategy": None if recipe.split is None else run.trainer.split.strategy,
        "baselines": {result.name: vars(result) for result in baselines},
        "federated": federated,
    }
    path = Path(str(run.trainer.args.output_dir))
    with nullcontext() if folder is None else folder.record_files():
        save_outputs(run.trainer, recipe, results)
        if recipe.plots:
            _plot(run, path, baselines)
        if recipe.audit is not None:
            echo("Audit (simulated clients):")
            _audit(recipe, path, echo)
    echo("")
    for line in closing_table(results):
        echo(line)
    saved = f"The model, its card (README.md){', plots' if recipe.plots else ''} and {RESULTS_NAME}"
    echo(f"\n{saved} are in {path}.")
    return results


def save_outputs(trainer: Any, recipe: Recipe, results: dict[str, Any]) -> None:
    """
    Write the model, the results, and the model card with its record to the output folder.

    Args:
        trainer ([`FederatedTrainer`] or [`SplitFederatedTrainer`]): The trainer.
        recipe ([`Recipe`]): The recipe.
        results (`dict`): The content of `results.json`.
    """
    path = Path(str(trainer.args.output_dir))
    with storage_errors(path, lambda: size_of_trained(trainer.model)):
        trainer.card_comparison = results
        trainer.save_model()
        (path / RESULTS_NAME).write_text(json.dumps(to_strict_json(results), indent=2) + "\n", encoding="utf-8")
        trainer.create_model_card(**recipe.card)
        record: Any = RunRecord if recipe.split is None else SplitRecord
        record.from_trainer(trainer, **recipe.card).save(path / RECORD_NAME)


def _audit(recipe: Recipe, path: Path, echo: Callable[[str], None]) -> None:
    """Attack what clients send, and add the results to the model card."""
    audit = audit_recipe(recipe, echo)
    audit.save(path / AUDIT_NAME)
    card = path / "README.md"
    card.write_text(add_payload_audit(card.read_text(encoding="utf-8"), audit), encoding="utf-8")


def _train_baselines(run: Run, echo: Callable[[str], None], folder: RunFolder | None) -> list[BaselineResult]:
    """Train the baselines of `compare`, except for baselines that an interrupted run finished."""
    num_clients = min(run.recipe.local_clients or len(run.data.train), len(run.data.train))
    titles = {
        "centralized": f"Centralized ({run.baselines.centralized_epochs:.3g} epochs over all training examples)",
        "local": f"Local only ({num_clients} clients, each trained alone)",
    }
    num_epochs = {"centralized": run.baselines.centralized_epochs, "local": run.baselines.local_epochs}
    results = []
    for name, title in titles.items():
        if name not in run.recipe.compare:
            continue
        result = None if folder is None else folder.find_baseline(name)
        # A resumed run may have another number of rounds.
        if result is not None and math.isclose(result.num_epochs, num_epochs[name]):
            echo(f"{title}: finished before the interruption.")
        else:
            echo(f"{title}:")
            result = run_baseline(run, name, echo)
            if folder is not None:
                folder.add_baseline(result)
        results.append(result)
    return results


def closing_table(results: dict[str, Any]) -> list[str]:
    """
    The table of results that is printed at the end of a run.

    Args:
        results (`dict`): The content of `results.json`.
    """
    rows = aligned_rows(comparison_rows(results))
    return [comparison_heading(results), *rows, *comparison_differences(results)]


def _plot(run: Run, folder: Path, baselines: list[BaselineResult]) -> None:
    clients, task = run.data.raw.train, run.data.task
    column = label_column(run.recipe.task)
    if isinstance(task, (SuperGlueClassification, SuperGlueSeq2Seq)):
        column = "task"  # as in figure 3 of FedDRS
    elif isinstance(task, SuperGlueCloze) and len(run.data.raw.test.unique("task")) > 1:
        column = "task"  # for a single task, the plot shows the labels, as in figure 5 of FL-GLM
    if column is not None:
        counts = label_counts(clients, column)
        by_client = dict(zip(counts.client_ids, counts.counts.tolist(), strict=True))
        plot_partition(by_client, folder / "partition.png", label_names=counts.label_names)
    else:
        plot_sizes(list(clients.num_rows.values()), folder / "partition.png")
    if (folder / ANOMALIES_NAME).exists():
        plot_anomalies(load_anomalies(folder), folder / "anomalies.png")
    names = {"local": "local-only"}
    plot_learning_curve(
        run.trainer.state.log_history,
        folder / "learning_curve.png",
        metric=f"eval_{run.metric}",
        references={names.get(item.name, item.name): item.metrics[run.metric] for item in baselines},
        step_name=run.step_name,
    )
