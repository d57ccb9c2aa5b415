"""Build the trainers of a recipe, and train it as a federation, centralized, or locally on every client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments

from hf_federated.config import FederatedConfig
from hf_federated.experiments.baselines import BaselineResult, Baselines, metrics_of
from hf_federated.experiments.data.tokenized import TokenizedData, encode_evaluated, load_tokenized_data
from hf_federated.experiments.model_loading import load_model, load_tokenizer
from hf_federated.experiments.predictions import MAIN_TEST
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import RecipeError, build, recipe_errors
from hf_federated.experiments.scoring import EvaluatedExamples, Scorer
from hf_federated.experiments.stopwatch import Stopwatch
from hf_federated.experiments.trainer_arguments import dataset_arguments
from hf_federated.reporting.run_plots import require_matplotlib
from hf_federated.split_training import SplitConfig, split_federate
from hf_federated.trainer import federate
from hf_federated.utils.printable import printable


@dataclass(frozen=True)
class Run:
    """
    A recipe with its loaded data and its trainers, before training.

    Args:
        recipe ([`Recipe`]): The recipe.
        federation ([`FederatedConfig`]): The configuration of the federation, with the number of rounds resolved. For
            a split model, the rounds are the epochs, and the configuration only determines how long baselines train.
        data ([`~hf_federated.experiments.data.tokenized.TokenizedData`]): The training clients and test examples.
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
    def num_rounds(self) -> int:
        """Number of rounds, or of epochs for a split model."""
        return self.federation.num_rounds or 1

    @property
    def step_name(self) -> str:
        """The unit of the trainer's steps: `"round"`, or `"optimizer step"` for a split model."""
        return "round" if self.recipe.split is None else "optimizer step"

    def scorer(self, method: str) -> Scorer:
        """
        Build the scorer of the test examples for [`run_federated`] or [`run_baseline`].

        Args:
            method (`str`): `"federated"`, `"centralized"` or `"local"`.
        """
        data = self.data
        # A trainer with client models, or with test examples by client, evaluates the rows in their original order.
        evaluates_sorted = method != "federated" or self.trainer.eval_dataset is data.test
        tests = {MAIN_TEST: EvaluatedExamples(data.test, data.test_rows if evaluates_sorted else data.raw.test)}
        for split, examples in data.further_tests.items():
            tests[split] = EvaluatedExamples(examples, data.raw.further_tests[split])
        rows = data.raw.validation
        validation = None if rows is None else encode_evaluated(data.task, self.trainer.processing_class, rows)
        return Scorer(data.task, tests, validation)

    def describe(self) -> list[str]:
        """Lines that state the number of clients, of training, public, dropped and test examples, and their source."""
        raw = self.data.raw
        lines = [f"Training: {len(raw.train)} clients with {sum(raw.train.num_rows.values())} examples."]
        if raw.public is not None:
            server = "" if raw.server is None else f" The server holds {len(raw.server)} labeled examples."
            lines.append(f"Public: {len(raw.public)} examples without labels.{server}")
        if raw.num_empty:
            lines.append(f"Dropped: {raw.num_empty} examples with an empty text or answer.")
        if raw.incomplete:
            of_sites = ", ".join(f"{name} {count}" for name, count in raw.incomplete.items())
            lines.append(f"Dropped: {sum(raw.incomplete.values())} incomplete examples ({printable(of_sites)}).")
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
    args = recipe.training_arguments(**({} if output_dir is None else {"output_dir": output_dir}))
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


def run_federated(run: Run, scorer: Scorer | None = None) -> dict[str, Any]:
    """
    Train the federation of a run and evaluate its model.

    Args:
        run ([`Run`]): The run.
        scorer ([`~hf_federated.experiments.scoring.Scorer`], *optional*): Keeps the predictions for test examples.

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
    # The clients of a split model share one model.
    results = train_and_evaluate(
        run.trainer,
        run.data.further_tests,
        run.trainer.args.resume_from_checkpoint,
        has_client_metrics=run.recipe.split is None,
        scorer=scorer,
    )
    return {**results, "num_epochs": run.baselines.centralized_epochs}


def train_and_evaluate(
    trainer: Any,
    further_tests: Mapping[str, Dataset],
    resume_from: str | bool | None,
    has_test: bool = True,
    has_client_metrics: bool = True,
    scorer: Scorer | None = None,
) -> dict[str, Any]:
    """
    Train and evaluate a model. The results are those of [`run_federated`] without `num_epochs`.

    Args:
        trainer ([`FederatedTrainer`] or [`SplitFederatedTrainer`]): The trainer.
        further_tests (`Mapping[str, datasets.Dataset]`): The encoded examples of `data.further_test_splits` by split.
        resume_from (`str` or `bool`, *optional*): The checkpoint to resume from, as in `Trainer.train`.
        has_test (`bool`, *optional*, defaults to `True`): Whether the trainer has test examples.
        has_client_metrics (`bool`, *optional*, defaults to `True`): Whether the trainer can evaluate clients.
        scorer ([`~hf_federated.experiments.scoring.Scorer`], *optional*): Keeps the predictions for test examples.
    """
    watch = Stopwatch()
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=resume_from)
    train_seconds = watch.seconds
    trainer.remove_callback(watch)
    metrics = {} if not has_test else trainer.evaluate() if scorer is None else scorer.evaluate(trainer)
    further = evaluate_further_splits(trainer, further_tests, scorer)
    clients = trainer.client_metrics if has_client_metrics else {}
    return {
        "metrics": metrics_of(metrics),
        "bytes_up": trainer.ledger.bytes_up,
        "bytes_down": trainer.ledger.bytes_down,
        "train_seconds": train_seconds,
        "seconds": watch.seconds,
        "over_clients": {name: value for name, value in metrics.items() if name.startswith("federated/")},
        "clients": {client_id: metrics_of(evaluated) for client_id, evaluated in clients.items()},
        "further_tests": further,
    }


def evaluate_further_splits(
    trainer: Any, further_tests: Mapping[str, Dataset], scorer: Scorer | None = None
) -> dict[str, dict[str, float]]:
    """
    Evaluate a trained model on the splits `data.further_test_splits`.

    Args:
        trainer (`transformers.Trainer`): The trainer of the model.
        further_tests (`Mapping[str, datasets.Dataset]`): The encoded examples by split.
        scorer ([`~hf_federated.experiments.scoring.Scorer`], *optional*): Keeps the predictions for the examples.

    Returns:
        `dict[str, dict[str, float]]`: The metrics by split.
    """
    results = {}
    for split, dataset in further_tests.items():
        prefix = f"further_{split}"  # distinguishes the logs from the evaluation of a round
        evaluate = trainer.evaluate if scorer is None else partial(scorer.evaluate, trainer, split)
        evaluated = evaluate(dataset, metric_key_prefix=prefix)
        results[split] = metrics_of({f"eval{key.removeprefix(prefix)}": value for key, value in evaluated.items()})
    return results


def run_baseline(
    run: Run, name: str, echo: Callable[[str], None] = lambda line: None, scorer: Scorer | None = None
) -> BaselineResult:
    """
    Train a baseline of a run.

    Args:
        run ([`Run`]): The run.
        name (`str`): `"centralized"` or `"local"`.
        echo (`Callable`, *optional*): Called with one line per client of `"local"`.
        scorer ([`~hf_federated.experiments.scoring.Scorer`], *optional*): Keeps the predictions for test examples.
    """
    if name == "centralized":
        return run.baselines.centralized(scorer)
    title = run.metric.replace("_", " ")
    return run.baselines.local(
        run.recipe.local_clients,
        on_client=lambda client_id, metrics: echo(f"  {client_id}: {title} {metrics[run.metric]:.3f}"),
        scorer=scorer,
    )
