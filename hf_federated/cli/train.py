"""`hf-federated train`: a recipe from its data to a model, its card, its plots and a closing table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import DataCollatorWithPadding, EvalPrediction, TrainingArguments

from hf_federated.cards import RunRecord
from hf_federated.cli.baselines import BaselineResult, Baselines
from hf_federated.cli.inputs import Clients, load_clients, load_model, load_tokenizer, pooled_by_length
from hf_federated.cli.recipe import Recipe, RecipeError, build, recipe_errors
from hf_federated.config import FederatedConfig
from hf_federated.data.plots import plot_learning_curve, plot_partition, require_matplotlib
from hf_federated.trainer import FederatedTrainer


RESULTS_NAME = "results.json"
# What the card is rendered from.
RECORD_NAME = "run_record.json"


@dataclass(frozen=True)
class Run:
    """
    What a recipe became: everything is loaded and checked, nothing is trained.

    Args:
        recipe ([`Recipe`]): The recipe.
        federation ([`FederatedConfig`]): Its federation, with the number of rounds resolved.
        clients ([`~hf_federated.cli.inputs.Clients`]): Training and held-out clients.
        test_rows (`datasets.Dataset`): The rows of the held-out clients, pooled.
        trainer ([`FederatedTrainer`]): Ready to train.
        baselines ([`~hf_federated.cli.baselines.Baselines`]): Ready to train.
    """

    recipe: Recipe
    federation: FederatedConfig
    clients: Clients
    test_rows: Dataset
    trainer: FederatedTrainer
    baselines: Baselines


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of rows whose highest score is their label's."""
    scores = prediction.predictions
    if isinstance(scores, tuple):
        scores = scores[0]
    return {"accuracy": float((np.argmax(scores, axis=-1) == prediction.label_ids).mean())}


def build_run(recipe: Recipe, output_dir: str | None = None) -> Run:
    """
    Loads what a recipe names and builds its trainers.

    Raises:
        RecipeError: If a section's values cannot be loaded or do not fit together.
    """
    if recipe.plots:
        with recipe_errors("plots"):
            require_matplotlib()
    training = {**recipe.training, **({"output_dir": output_dir} if output_dir is not None else {})}
    args: TrainingArguments = build("training", TrainingArguments, training)
    if args.world_size > 1:
        raise RecipeError(
            "hf-federated train runs in one process; under `accelerate launch` run a script with a FederatedTrainer, "
            "such as recipes/drop_in/federated.py"
        )
    federation: FederatedConfig = build("federation", FederatedConfig, recipe.federation)
    tokenizer = load_tokenizer(recipe.model)
    clients = load_clients(recipe.data, tokenizer)
    model = load_model(recipe.model, clients.label_names, args.seed)
    test_rows = pooled_by_length(clients.test)
    shared: dict[str, Any] = {
        "processing_class": tokenizer,
        "data_collator": DataCollatorWithPadding(tokenizer),
        "compute_metrics": accuracy,
    }
    with recipe_errors("federation"):
        trainer = FederatedTrainer(
            model=model,
            args=args,
            train_dataset=clients.train,
            eval_dataset=clients.test if federation.evaluate_clients else test_rows,
            federation=federation,
            **shared,
        )
    assert trainer.federation is not None  # it was given one
    # Copies the model, which the trainer above has not trained yet.
    baselines = Baselines(model, args, trainer.federation, clients.train, test_rows, **shared)
    return Run(recipe, trainer.federation, clients, test_rows, trainer, baselines)


def train(recipe: Recipe, output_dir: str | None = None, echo: Callable[[str], None] = print) -> dict[str, Any]:
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
    train_rows, num_test = sum(run.clients.train.num_rows.values()), len(run.clients.test)
    echo(f"Training: {len(run.clients.train)} clients with {train_rows} rows.")
    echo(f"Test: {num_test} other clients with {len(run.test_rows)} rows.")
    baselines = _train_baselines(run, echo)
    echo(f"Federated (rounds: {run.federation.num_rounds}; so count the bar and the logs):")
    start = time.perf_counter()
    run.trainer.train(resume_from_checkpoint=run.trainer.args.resume_from_checkpoint)
    train_seconds = time.perf_counter() - start
    metrics = run.trainer.evaluate()
    seconds = time.perf_counter() - start
    results = {
        "num_train_clients": len(run.clients.train),
        "num_train_rows": train_rows,
        "num_test_clients": num_test,
        "num_test_rows": len(run.test_rows),
        "baselines": {result.name: vars(result) for result in baselines},
        "federated": {
            "accuracy": metrics["eval_accuracy"],
            "loss": metrics["eval_loss"],
            "num_epochs": run.baselines.centralized_epochs,
            "bytes_up": run.trainer.ledger.bytes_up,
            "bytes_down": run.trainer.ledger.bytes_down,
            "train_seconds": train_seconds,
            "seconds": seconds,
            "over_clients": {name: value for name, value in metrics.items() if name.startswith("federated/")},
        },
    }
    folder = Path(str(run.trainer.args.output_dir))
    run.trainer.save_model()
    (folder / RESULTS_NAME).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    run.trainer.create_model_card(**recipe.card)
    RunRecord.from_trainer(run.trainer, **recipe.card).save(folder / RECORD_NAME)
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
        results.append(run.baselines.centralized())
    if "local" in run.recipe.compare:
        wanted = run.recipe.local_clients or len(run.clients.train)
        echo(f"Local only ({min(wanted, len(run.clients.train))} clients, each alone):")
        results.append(
            run.baselines.local(
                run.recipe.local_clients,
                on_client=lambda client_id, metrics: echo(f"  {client_id}: accuracy {metrics['accuracy']:.3f}"),
            )
        )
    return results


def closing_table(results: dict[str, Any]) -> list[str]:
    """
    The lines that a run ends with.

    Args:
        results (`dict`): The content of `results.json`.
    """
    federated = results["federated"]
    rows = [("", "accuracy", "passes/row", "bytes up", "bytes down", "seconds")]
    labels = {"centralized": "centralized", "local": "local-only (mean of {})"}
    for name, result in results["baselines"].items():
        spread = f" ±{result['spread']['accuracy']:.3f}" if result["spread"] else ""
        rows.append(
            (
                labels[name].format(result["num_clients"]),
                f"{result['metrics']['accuracy']:.3f}{spread}",
                f"{result['num_epochs']:.2f}",
                "-",
                "-",
                f"{result['seconds']:.0f}",
            )
        )
    rows.append(
        (
            "federated",
            f"{federated['accuracy']:.3f}",
            f"{federated['num_epochs']:.2f}",
            _megabytes(federated["bytes_up"]),
            _megabytes(federated["bytes_down"]),
            f"{federated['seconds']:.0f}",
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"Accuracy on the same {results['num_test_rows']} rows of {results['num_test_clients']} held-out clients:",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    for name, result in results["baselines"].items():
        difference = 100 * (federated["accuracy"] - result["metrics"]["accuracy"])
        lines.append(f"federated minus {labels[name].partition(' ')[0]}: {difference:+.1f} points")
    return lines


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _plot(run: Run, folder: Path, baselines: list[BaselineResult]) -> None:
    train, names = run.clients.train, run.clients.label_names
    counts = {client_id: np.bincount(train[client_id]["labels"], minlength=len(names)).tolist() for client_id in train}
    plot_partition(counts, folder / "partition.png", label_names=names)
    plot_learning_curve(
        run.trainer.state.log_history,
        folder / "learning_curve.png",
        metric="eval_accuracy",
        references={{"local": "local-only"}.get(item.name, item.name): item.metrics["accuracy"] for item in baselines},
    )
