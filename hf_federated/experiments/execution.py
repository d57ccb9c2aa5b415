"""Build the trainers of a recipe, and train it as a federation, centralized, or locally on every client."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging as transformers_logging

from hf_federated.config import FederatedConfig
from hf_federated.data.source import content_hash
from hf_federated.experiments.baselines import BaselineResult, Baselines
from hf_federated.experiments.model_loading import (
    TokenizedData,
    load_model,
    load_tokenized_data,
    load_tokenizer,
)
from hf_federated.experiments.recipe.recipe import Recipe, parse_recipe
from hf_federated.experiments.recipe.schema import RecipeError, build, recipe_errors
from hf_federated.experiments.stopwatch import Stopwatch
from hf_federated.experiments.trainer_arguments import dataset_arguments
from hf_federated.reporting.run_plots import require_matplotlib
from hf_federated.split_training import SplitConfig, split_federate
from hf_federated.trainer import federate


# Logged values of a method that are kept in the record of a run: the aggregation weight of each client, whether an LLM
# failed to provide weights, the ratio of feedback to distillation, and the losses of distillation.
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
    A recipe with its loaded data and its trainers, before training.

    Args:
        recipe ([`Recipe`]): The recipe.
        federation ([`FederatedConfig`]): The configuration of the federation, with the number of rounds resolved. For
            a split model, the rounds are the epochs, and the configuration only determines how long baselines train.
        data ([`~hf_federated.experiments.model_loading.TokenizedData`]): The training clients and test examples.
        trainer ([`FederatedTrainer`] or [`SplitFederatedTrainer`]): The trainer.
        baselines ([`~hf_federated.experiments.baselines.Baselines`]): The baselines.
    """

    recipe: Recipe
    federation: FederatedConfig
    data: TokenizedData
    trainer: Any
    baselines: Baselines

    @property
    def metric(self) -> str:
        """The main metric of the task."""
        return self.data.task.main_metric

    @property
    def step_name(self) -> str:
        """The unit of the trainer's steps: `"round"`, or `"optimizer step"` for a split model."""
        return "round" if self.recipe.split is None else "optimizer step"

    def describe(self) -> list[str]:
        """Lines that state the number of clients, of training, public, dropped and test examples, and their source."""
        raw = self.data.raw
        lines = [f"Training: {len(raw.train)} clients with {sum(raw.train.num_rows.values())} examples."]
        if raw.public is not None:
            server = "" if raw.server is None else f" The server holds {len(raw.server)} labeled examples."
            lines.append(f"Public: {len(raw.public)} examples without labels.{server}")
        if raw.num_empty:
            lines.append(f"Dropped: {raw.num_empty} examples with an empty text or answer.")
        if raw.num_without_client:
            lines.append(f"Dropped: {raw.num_without_client} test examples that no client has.")
        lines.append(f"Test: {len(raw.test)} examples{raw.test_source}.")
        if raw.note:
            lines.append(raw.note)
        return lines


def build_run(recipe: Recipe, output_dir: str | None = None) -> Run:
    """
    Load the data and models of a recipe and build its trainers.

    Args:
        recipe ([`Recipe`]): The recipe.
        output_dir (`str`, *optional*): Overrides `training.output_dir` of the recipe.

    Raises:
        RecipeError: If data or models cannot be loaded, or values are incompatible.
    """
    if recipe.plots:
        with recipe_errors("plots"):
            require_matplotlib()
    training = {**recipe.training, **({"output_dir": output_dir} if output_dir is not None else {})}
    if recipe.task.generates_text:
        training["predict_with_generate"] = True
    args: TrainingArguments = build("training", recipe.task.cls.arguments_class, training)
    if args.world_size > 1:
        raise RecipeError(
            f"the run was started with {args.world_size} processes, but a recipe runs in one process. To use"
            " `accelerate launch`, run a script with a FederatedTrainer, such as recipes/drop_in/federated.py."
        )
    federation: FederatedConfig = build("federation", FederatedConfig, recipe.federation)
    tokenizer = load_tokenizer(recipe.model)
    data = load_tokenized_data(recipe, tokenizer, federation.evaluate_clients)
    model = load_model(recipe.model, data.task, tokenizer, args.seed)
    shared: dict[str, Any] = {
        "processing_class": tokenizer,
        "data_collator": data.task.data_collator(tokenizer, model),
        **data.metric_arguments,
    }
    if recipe.split is not None:
        return _build_split(recipe, args, data, model, shared)
    arguments = dataset_arguments(recipe, data, tokenizer, args, shared)
    with recipe_errors("federation"):
        trainer_class: Any = data.task.trainer_class
        trainer: Any = federate(trainer_class)(model=model, args=args, federation=federation, **arguments)
    # Baselines copies the model, which is still untrained.
    baselines = Baselines(
        model,
        args,
        trainer.federation,
        data.train,
        data.test,
        data.task.trainer_class,
        data.test_clients,
        data.further_tests,
        **shared,
    )
    return Run(recipe, trainer.federation, data, trainer, baselines)


def _build_split(
    recipe: Recipe, args: TrainingArguments, data: TokenizedData, model: Any, shared: dict[str, Any]
) -> Run:
    """Build the run of a split model. Baselines train the unsplit model for the same number of epochs."""
    if args.max_steps > 0 or args.num_train_epochs != int(args.num_train_epochs):
        raise RecipeError(
            "split: the run needs a whole number of epochs, so that baselines train equally long. Set"
            " training.num_train_epochs to an integer and remove training.max_steps."
        )
    trainer_class: Any = data.task.trainer_class
    epochs = FederatedConfig(num_rounds=int(args.num_train_epochs), clients_per_round=1.0)
    baselines = Baselines(
        model, args, epochs, data.train, data.test, trainer_class, further_tests=data.further_tests, **shared
    )
    split: SplitConfig = build("split", SplitConfig, recipe.split or {})
    with recipe_errors("split"):
        trainer = split_federate(trainer_class)(
            model=model, args=args, train_dataset=data.train, eval_dataset=data.test, split=split, **shared
        )
    return Run(recipe, epochs, data, trainer, baselines)


def run_federated(run: Run) -> dict[str, Any]:
    """
    Train the federation of a run and evaluate its model.

    Args:
        run ([`Run`]): The run.

    Returns:
        `dict[str, Any]`:

        - `metrics`: metrics on the test examples, without the prefix `eval_`;
        - `num_epochs`: the expected number of epochs of an example;
        - `bytes_up` and `bytes_down`: bytes sent by and to clients;
        - `train_seconds` and `seconds`: duration of training, and of training with evaluation. If the training resumed
          from a checkpoint, the duration includes the training before the checkpoint, or is `None` if the checkpoint
          was saved by another program;
        - `over_clients`: the distribution of metrics over the clients, if clients were evaluated;
        - `clients`: the metrics of each client, if clients were evaluated;
        - `further_tests`: the metrics on each split of `data.further_test_splits`.
    """
    watch = Stopwatch()
    run.trainer.add_callback(watch)
    run.trainer.train(resume_from_checkpoint=run.trainer.args.resume_from_checkpoint)
    train_seconds = watch.seconds
    run.trainer.remove_callback(watch)
    metrics = run.trainer.evaluate()
    further_tests = evaluate_further_splits(run.trainer, run.data.further_tests)
    # The clients of a split model share one model.
    clients = {} if run.recipe.split is not None else run.trainer.client_metrics
    return {
        "metrics": metrics_of(metrics),
        "num_epochs": run.baselines.centralized_epochs,
        "bytes_up": run.trainer.ledger.bytes_up,
        "bytes_down": run.trainer.ledger.bytes_down,
        "train_seconds": train_seconds,
        "seconds": watch.seconds,
        "over_clients": {name: value for name, value in metrics.items() if name.startswith("federated/")},
        "clients": {client_id: metrics_of(evaluated) for client_id, evaluated in clients.items()},
        "further_tests": further_tests,
    }


# Fields of a federation that baselines do not use.
EXCHANGE_FIELDS = ("aggregation", "aggregation_kwargs", "distillation", "distillation_kwargs")


def evaluate_further_splits(trainer: Any, further_tests: Mapping[str, Dataset]) -> dict[str, dict[str, float]]:
    """
    Evaluate a trained model on the splits `data.further_test_splits`.

    Args:
        trainer (`transformers.Trainer`): The trainer of the model.
        further_tests (`Mapping[str, datasets.Dataset]`): The encoded examples by split.

    Returns:
        `dict[str, dict[str, float]]`: The metrics by split.
    """
    results = {}
    for split, dataset in further_tests.items():
        prefix = f"further_{split}"  # distinguishes the logs from the evaluation of a round
        evaluated = trainer.evaluate(dataset, metric_key_prefix=prefix)
        results[split] = metrics_of({f"eval{key.removeprefix(prefix)}": value for key, value in evaluated.items()})
    return results


def measure_run(values: dict[str, Any], method: str, folder: Path) -> dict[str, Any]:
    """
    Execute one run of a benchmark without progress bars, and return its results. The model is not saved.

    If the recipe saves checkpoints and an interrupted run left a checkpoint in `folder`, a federated run resumes from
    the last checkpoint. A run that finishes removes its checkpoints.

    Args:
        values (`dict[str, Any]`): The recipe of the run, as returned by
            [`~hf_federated.experiments.recipe.yaml_file.read_values`].
        method (`str`): `"federated"`, `"centralized"` or `"local"`.
        folder (`Path`): Output folder, which only this run uses.

    Returns:
        `dict[str, Any]`: The results that [`~hf_federated.experiments.benchmark.benchmark.run_benchmark`] expects of a
            run.

    Raises:
        RecipeError: If the recipe cannot be run, or a run that resumed from a checkpoint fails.
    """
    recipe = parse_recipe(values)
    if method != "federated":  # baselines train the server's model without communication
        settings = {name: value for name, value in recipe.federation.items() if name not in EXCHANGE_FIELDS}
        recipe = dataclasses.replace(recipe, client_models=[], federation=settings)
    training = {"disable_tqdm": True, "report_to": "none", **recipe.training}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # hides the warnings about new heads in every run
    try:
        run = build_run(dataclasses.replace(recipe, training=training, plots=False), str(folder))
        run.trainer.remove_callback(PrinterCallback)
        if method == "federated":
            has_checkpoint = folder.is_dir() and get_last_checkpoint(str(folder)) is not None
            run.trainer.args.resume_from_checkpoint = True if has_checkpoint else None
            try:
                result = run_federated(run)
            except Exception as error:
                if not has_checkpoint:
                    raise
                raise RecipeError(
                    f"{error} (The run resumed from a checkpoint in {folder}. Delete the checkpoint to start anew.)"
                ) from error
            num_rounds = run.trainer.state.max_steps
            result |= {"num_rounds": num_rounds, "step_name": run.step_name}
            result |= _read_logs(run.trainer.state.log_history, num_rounds)
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint)
        else:
            result = vars(run_baseline(run, method))
    finally:
        transformers_logging.set_verbosity(verbosity)
    num_clients = result.get("num_clients", len(run.data.train))
    return {
        **result,
        "metric": run.metric,
        "lower_is_better": run.data.task.lower_is_better,
        "scale": recipe.scale,
        "num_clients": num_clients,
        "test_source": f"{len(run.data.raw.test)} examples{run.data.raw.test_source}",
        "train_rows": content_hash(run.data.raw.train.to_dataset()),
        "test_rows": content_hash(run.data.raw.test),
        "further_rows": {split: content_hash(rows) for split, rows in run.data.raw.further_tests.items()},
    }


def _read_logs(logs: list[dict[str, Any]], num_rounds: int | None) -> dict[str, Any]:
    """Read metrics and logged values of each round, and the number of failed updates, from the log history."""
    rounds: dict[int, dict[str, float]] = {}
    for entry in logs:
        values = {name.removeprefix("eval_"): value for name, value in entry.items() if _is_metric(name)}
        method_names = (name for name in entry if name.startswith(WEIGHT_PREFIX) or name in METHOD_LOGS)
        values |= {name.removeprefix("federated/"): entry[name] for name in method_names}
        if values:
            rounds.setdefault(entry["step"], {}).update(values)
    history = [{"round": number, **values} for number, values in sorted(rounds.items())]
    failed = [entry["federated/num_failed"] for entry in logs if "federated/num_failed" in entry]
    # The number is unknown if some rounds were not logged.
    return {"history": history, "num_failed": sum(failed) if len(failed) == num_rounds else None}


def metrics_of(evaluated: dict[str, float]) -> dict[str, float]:
    """The metrics returned by `evaluate`, without durations and without the prefix `eval_`."""
    return {name.removeprefix("eval_"): value for name, value in evaluated.items() if _is_metric(name)}


def _is_metric(name: str) -> bool:
    return name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))


def run_baseline(run: Run, name: str, echo: Callable[[str], None] = lambda line: None) -> BaselineResult:
    """
    Train a baseline of a run.

    Args:
        run ([`Run`]): The run.
        name (`str`): `"centralized"` or `"local"`.
        echo (`Callable`, *optional*): Called with one line per client of `"local"`.
    """
    if name == "centralized":
        return run.baselines.centralized()
    return run.baselines.local(
        run.recipe.local_clients,
        on_client=lambda client_id, metrics: echo(f"  {client_id}: {_title(run.metric)} {metrics[run.metric]:.3f}"),
    )


def _title(metric: str) -> str:
    return metric.replace("_", " ")
