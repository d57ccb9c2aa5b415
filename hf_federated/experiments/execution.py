"""A recipe made ready, and its three ways of training: federated, centralized, and every client on its own."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging as transformers_logging

from hf_federated.config import FederatedConfig
from hf_federated.data.source import content_hash
from hf_federated.distillation import DISTILLATIONS
from hf_federated.experiments.baselines import BaselineResult, Baselines
from hf_federated.experiments.recipe import Recipe, RecipeError, build, parse_recipe, recipe_errors
from hf_federated.experiments.recipe_loading import Inputs, load_client_specs, load_inputs, load_model, load_tokenizer
from hf_federated.reporting.run_plots import require_matplotlib
from hf_federated.split_training import SplitConfig, split_federate
from hf_federated.trainer import federate


# What a method logs of itself and a record keeps: of each client what it weighed, whether a language model said so,
# how long the feedback is beside the distillation, and the losses of distillation.
WEIGHT_PREFIX = "federated/weight/"
METHOD_LOGS = {
    "federated/llm_fell_back",
    "federated/feedback_ratio",
    "federated/server_distillation_loss",
    "federated/client_distillation_loss",
}


@dataclass(frozen=True)
class Run:
    """
    What a recipe became: everything is loaded and checked, nothing is trained.

    Args:
        recipe ([`Recipe`]): The recipe.
        federation ([`FederatedConfig`]): Its federation, with the number of rounds resolved; of a split model the
            rounds are its epochs, and it says no more than how long baselines train.
        inputs ([`~hf_federated.experiments.recipe_loading.Inputs`]): Training clients and test rows.
        trainer ([`FederatedTrainer`] or [`SplitFederatedTrainer`]): Ready to train.
        baselines ([`~hf_federated.experiments.baselines.Baselines`]): Ready to train.
    """

    recipe: Recipe
    federation: FederatedConfig
    inputs: Inputs
    trainer: Any
    baselines: Baselines

    @property
    def metric(self) -> str:
        """The metric that results are compared by."""
        return self.inputs.task.main_metric

    @property
    def step_name(self) -> str:
        """What a step of the trainer is."""
        return "round" if self.recipe.split is None else "optimizer step"

    def describe(self) -> list[str]:
        """Who trains on how many rows, and on what is tested."""
        raw, data = self.inputs.raw, self.recipe.data
        lines = [f"Training: {len(raw.train)} clients with {sum(raw.train.num_rows.values())} rows."]
        if raw.public is not None:
            server = "" if raw.server is None else f" {len(raw.server)} labelled ones are the server's."
            lines.append(f"Public: {len(raw.public)} rows without labels.{server}")
        if raw.num_empty:
            lines.append(f"Left out: {raw.num_empty} rows in which something is empty.")
        if raw.num_without_client:
            lines.append(f"Left out: {raw.num_without_client} test rows that no client has.")
        if data.test_split is not None:
            lines.append(f"Test: {len(raw.test)} rows of the split {data.test_split!r}.")
        elif raw.test_clients is not None:
            lines.append(f"Test: {len(raw.test_clients)} other clients with {len(raw.test)} rows.")
        return lines


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
    if recipe.task.writes:
        training["predict_with_generate"] = True
    args: TrainingArguments = build("training", recipe.task.cls.arguments_class, training)
    if args.world_size > 1:
        raise RecipeError(
            "a recipe runs in one process; under `accelerate launch` run a script with a FederatedTrainer, such as"
            " recipes/drop_in/federated.py"
        )
    federation: FederatedConfig = build("federation", FederatedConfig, recipe.federation)
    tokenizer = load_tokenizer(recipe.model)
    inputs = load_inputs(recipe, tokenizer, federation.evaluate_clients)
    model = load_model(recipe.model, inputs.task, tokenizer, args.seed)
    shared: dict[str, Any] = {
        "processing_class": tokenizer,
        "data_collator": inputs.task.data_collator(tokenizer),
        **inputs.metrics,
    }
    if recipe.split is not None:
        return _build_split(recipe, args, inputs, model, shared)
    with recipe_errors("federation"):
        trainer_class: Any = inputs.task.trainer_class
        trainer = federate(trainer_class)(
            model=model, args=args, federation=federation, **_rows_of(recipe, inputs, tokenizer, args, shared)
        )
    assert trainer.federation is not None  # it was given one
    # Copies the model, which the trainer above has not trained yet.
    baselines = Baselines(
        model,
        args,
        trainer.federation,
        inputs.train,
        inputs.test,
        inputs.task.trainer_class,
        inputs.test_clients,
        inputs.further_tests,
        **shared,
    )
    return Run(recipe, trainer.federation, inputs, trainer, baselines)


def _build_split(recipe: Recipe, args: TrainingArguments, inputs: Inputs, model: Any, shared: dict[str, Any]) -> Run:
    """The run of a split model. Baselines train the whole one for as many passes over the rows."""
    if args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs):
        raise RecipeError("split: give whole training.num_train_epochs, so that baselines see each row as often.")
    trainer_class: Any = inputs.task.trainer_class
    epochs = FederatedConfig(num_rounds=int(args.num_train_epochs), clients_per_round=1.0)
    baselines = Baselines(
        model, args, epochs, inputs.train, inputs.test, trainer_class, further_tests=inputs.further_tests, **shared
    )
    split: SplitConfig = build("split", SplitConfig, recipe.split or {})
    with recipe_errors("split"):
        trainer = split_federate(trainer_class)(
            model=model, args=args, train_dataset=inputs.train, eval_dataset=inputs.test, split=split, **shared
        )
    return Run(recipe, epochs, inputs, trainer, baselines)


def _rows_of(
    recipe: Recipe, inputs: Inputs, tokenizer: Any, args: TrainingArguments, shared: dict[str, Any]
) -> dict[str, Any]:
    """What the trainer gets beside its model and arguments: rows, and clients that differ."""
    raw, task = inputs.raw, inputs.task
    method = recipe.federation.get("distillation")
    if method is None or (method in DISTILLATIONS and not DISTILLATIONS[method]().requirements.public_dataset):
        # Rows that were set aside train nobody, so that runs with and without distillation have the same private ones.
        raw = dataclasses.replace(raw, public=None, server=None)
    if recipe.client_models or (raw.public is not None and task.prediction_unit != "row"):
        # Each client encodes raw rows with its own tokenizer; and where in a row it predicts, the task knows.
        return {
            "processing_class": tokenizer,
            "task": task,
            "train_dataset": raw.train,
            "eval_dataset": raw.test if inputs.test_clients is None else raw.test_clients,
            "public_dataset": raw.public,
            "server_dataset": raw.server,
            "clients": load_client_specs(recipe, task, args, list(raw.train)) if recipe.client_models else {},
        }
    with recipe_errors("public"):
        public = None if raw.public is None else task.prepare(raw.public, tokenizer, with_labels=False)
        server = None if raw.server is None else task.prepare(raw.server, tokenizer)
    return {
        "train_dataset": inputs.train,
        "eval_dataset": inputs.test if inputs.test_clients is None else inputs.test_clients,
        "public_dataset": public,
        "server_dataset": server,
        **shared,
    }


def run_federated(run: Run) -> dict[str, Any]:
    """
    Trains the federation of a run and evaluates its model.

    Returns:
        `dict[str, Any]`: `metrics` on the test rows, without the prefix `eval_`; `num_epochs`, the passes that are
        expected over a row; `bytes_up` and `bytes_down` of the ledger; `train_seconds` and `seconds`;
        `over_clients`, how metrics spread over the clients, and `clients`, those of each, if they were evaluated;
        `further_tests`, by split of `data.further_test_splits`, metrics on its rows.
    """
    start = time.perf_counter()
    run.trainer.train(resume_from_checkpoint=run.trainer.args.resume_from_checkpoint)
    train_seconds = time.perf_counter() - start
    metrics = run.trainer.evaluate()
    further = evaluate_further(run.trainer, run.inputs)
    # A split model's clients have no models of their own.
    clients = {} if run.recipe.split is not None else run.trainer.client_metrics
    return {
        "metrics": _metrics(metrics),
        "num_epochs": run.baselines.centralized_epochs,
        "bytes_up": run.trainer.ledger.bytes_up,
        "bytes_down": run.trainer.ledger.bytes_down,
        "train_seconds": train_seconds,
        "seconds": time.perf_counter() - start,
        "over_clients": {name: value for name, value in metrics.items() if name.startswith("federated/")},
        "clients": {client_id: _metrics(own) for client_id, own in clients.items()},
        "further_tests": further,
    }


# Fields of a federation that a baseline has no use for.
EXCHANGES = ("aggregation", "aggregation_kwargs", "distillation", "distillation_kwargs")


def evaluate_further(trainer: Any, inputs: Inputs) -> dict[str, dict[str, float]]:
    """
    The metrics of a trained model on the rows of `data.further_test_splits`, by split.

    Args:
        trainer (`transformers.Trainer`): With the model.
        inputs ([`~hf_federated.experiments.recipe_loading.Inputs`]): With the rows.
    """
    further = {}
    for split, rows in inputs.further_tests.items():
        prefix = f"further_{split}"  # a name of its own, so that no log takes it for the round's evaluation
        found = trainer.evaluate(rows, metric_key_prefix=prefix)
        further[split] = _metrics({f"eval{key.removeprefix(prefix)}": value for key, value in found.items()})
    return further


def measure(values: dict[str, Any], method: str, folder: Path) -> dict[str, Any]:
    """
    Makes one run of a benchmark's grid, quietly, and keeps its numbers and no model.

    A federated run whose recipe saves checkpoints goes on from its last one, if a killed run has left it. A run that
    comes to its end leaves none.

    Args:
        values (`dict[str, Any]`): The run's recipe, as
            [`~hf_federated.experiments.recipe_yaml.read_values`] returns one.
        method (`str`): `"federated"`, `"centralized"` or `"local"`.
        folder (`Path`): What the run may write to, and nobody else has.

    Returns:
        `dict[str, Any]`: What [`~hf_federated.experiments.benchmark.benchmark`] asks of a run.
    """
    recipe = parse_recipe(values)
    if method != "federated":  # baselines train the recipe's own model, and exchange nothing
        settings = {name: value for name, value in recipe.federation.items() if name not in EXCHANGES}
        recipe = dataclasses.replace(recipe, client_models=[], federation=settings)
    training = {"disable_tqdm": True, "report_to": "none", **recipe.training}
    quiet = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the same news of new heads for every run
    try:
        run = build_run(dataclasses.replace(recipe, training=training, plots=False), str(folder))
        run.trainer.remove_callback(PrinterCallback)
        if method == "federated":
            found = folder.is_dir() and get_last_checkpoint(str(folder)) is not None
            run.trainer.args.resume_from_checkpoint = True if found else None
            try:
                result = run_federated(run)
            except Exception as error:
                if not found:
                    raise
                raise RecipeError(
                    f"{error} (It went on from a checkpoint in {folder}; without it, it begins anew.)"
                ) from error
            num_rounds = run.trainer.state.max_steps
            result |= {"num_rounds": num_rounds, "step_name": run.step_name}
            result |= _read_logs(run.trainer.state.log_history, num_rounds)
            if found:
                result["seconds"] = None  # those of the rest
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        else:
            result = vars(run_baseline(run, method))
    finally:
        transformers_logging.set_verbosity(quiet)
    num_clients = result.get("num_clients", len(run.inputs.train))
    return {
        **result,
        "metric": run.metric,
        "lower_is_better": run.inputs.task.lower_is_better,
        "scale": recipe.scale,
        "num_clients": num_clients,
        "train_rows": content_hash(run.inputs.raw.train.to_dataset()),
        "test_rows": content_hash(run.inputs.raw.test),
        "further_rows": {split: content_hash(rows) for split, rows in run.inputs.raw.further_tests.items()},
    }


def _read_logs(logs: list[dict[str, Any]], num_rounds: int | None) -> dict[str, Any]:
    """Each round's metrics on the test rows and what a method says of itself; how many updates were not used."""
    rounds: dict[int, dict[str, float]] = {}
    for entry in logs:
        found = {name.removeprefix("eval_"): value for name, value in entry.items() if _is_metric(name)}
        own = (name for name in entry if name.startswith(WEIGHT_PREFIX) or name in METHOD_LOGS)
        found |= {name.removeprefix("federated/"): entry[name] for name in own}
        if found:
            rounds.setdefault(entry["step"], {}).update(found)
    history = [{"round": number, **found} for number, found in sorted(rounds.items())]
    failed = [entry["federated/num_failed"] for entry in logs if "federated/num_failed" in entry]
    # Not known if not every round was logged.
    return {"history": history, "num_failed": sum(failed) if len(failed) == num_rounds else None}


def _metrics(evaluated: dict[str, float]) -> dict[str, float]:
    """What `evaluate` returns, without times and without the prefix `eval_`."""
    return {name.removeprefix("eval_"): value for name, value in evaluated.items() if _is_metric(name)}


def _is_metric(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))


def run_baseline(run: Run, name: str, echo: Callable[[str], None] = lambda line: None) -> BaselineResult:
    """
    Trains a baseline of a run: `"centralized"` or `"local"`.

    Args:
        run ([`Run`]): The run.
        name (`str`): The baseline.
        echo (`Callable`, *optional*): Called with a line for each client that trained alone.
    """
    if name == "centralized":
        return run.baselines.centralized()
    return run.baselines.local(
        run.recipe.local_clients,
        on_client=lambda client_id, metrics: echo(f"  {client_id}: {_title(run.metric)} {metrics[run.metric]:.3f}"),
    )


def _title(metric: str) -> str:
    return metric.replace("_", " ")
