"""Training of a recipe with clients on other machines, as the server or as a client.

All parties use the same recipe, and each party loads its own examples (`party_data.py`). The result of the server has
the same bytes as the result of `hf-federated train` with the same examples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import IntervalStrategy, TrainingArguments

from hf_federated.config import FederatedConfig
from hf_federated.data import FederatedDataset
from hf_federated.engines import NetworkEngine
from hf_federated.experiments.cached_features import fit_encoder
from hf_federated.experiments.data.incomplete import incomplete_errors
from hf_federated.experiments.data.tokenized import tokenize_test
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.execution import train_and_evaluate
from hf_federated.experiments.model_loading import load_model, load_tokenizer
from hf_federated.experiments.network.listed_counts import listed_counts
from hf_federated.experiments.network.party_data import PartyData, load_client_data, load_server_data
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import build, recipe_errors
from hf_federated.experiments.recipe.sections import DEFAULT_OUTPUT_DIR
from hf_federated.experiments.run_folder import RESULTS_NAME, RunFolder
from hf_federated.experiments.train_recipe import save_outputs
from hf_federated.experiments.trainer_arguments import PartyDatasets, trainer_arguments
from hf_federated.trainer import federate
from hf_federated.utils.client_names import escape_client_id


@dataclass(frozen=True)
class PartyRun:
    """
    A party of a recipe, before training.

    Args:
        recipe ([`Recipe`]): The recipe.
        data ([`~hf_federated.experiments.network.party_data.PartyData`]): The examples of the party.
        trainer ([`FederatedTrainer`]): The trainer.
        further_tests (`dict[str, Any]`): Encoded additional test examples by split.
    """

    recipe: Recipe
    data: PartyData
    trainer: Any
    further_tests: dict[str, Any]


def party_folder(recipe: Recipe, party: str, output_dir: str | None = None) -> str:
    """
    Return the output folder of a party, which is a folder in the output folder of the recipe.

    Args:
        recipe ([`Recipe`]): The recipe.
        party (`str`): `"server"`, or the id of a client.
        output_dir (`str`, *optional*): Overrides `training.output_dir` of the recipe.
    """
    folder = output_dir or recipe.training.get("output_dir") or DEFAULT_OUTPUT_DIR
    return str(Path(folder) / escape_client_id(party))


def build_engine(recipe: Recipe, **changes: Any) -> NetworkEngine:
    """
    Build the engine of the server from the section `network`.

    Args:
        recipe ([`Recipe`]): The recipe.
        changes (`Any`): Arguments of [`NetworkEngine`]. They replace fields of the section unless they are `None`.

    Raises:
        CommandError: If a value is not allowed, or if there are no clients.
    """
    given = (*vars(recipe.network).items(), *changes.items())
    arguments = {name: value for name, value in given if value is not None}
    if not arguments["clients"]:
        raise CommandError("the clients are not known. Pass --client ID for each client, or set network.clients.")
    with recipe_errors("network"):
        return NetworkEngine(**arguments)


def build_server(
    recipe: Recipe, engine: NetworkEngine, output_dir: str | None = None, test_examples: str | None = None
) -> PartyRun:
    """
    Load the examples and the model of the server, and build its trainer.

    Args:
        recipe ([`Recipe`]): The recipe.
        engine ([`NetworkEngine`]): The engine with the clients.
        output_dir (`str`, *optional*): Output folder of all parties. Overrides `training.output_dir` of the recipe.
        test_examples (`str`, *optional*): File, folder or Hub id with the test examples. Replaces `data.test_path`.

    Raises:
        RecipeError: If data or models cannot be loaded, or values are incompatible.
    """
    args = recipe.training_arguments(output_dir=party_folder(recipe, "server", output_dir))
    data = load_server_data(recipe, test_examples)
    tokenizer = load_tokenizer(recipe.model)
    fit_encoder(tokenizer, data.task, data.public)
    metric_arguments: dict[str, Any] = {}
    encoded: dict[str, Any] = {}
    if data.test is None:
        # Parties that have no test examples do not evaluate.
        args.eval_strategy, args.load_best_model_at_end = IntervalStrategy.NO, False
    else:
        encoded["eval_dataset"], metric_arguments = tokenize_test(data.task, tokenizer, data.test)
    raw = {"eval_dataset": data.test}
    counts = listed_counts(recipe, list(engine.remote_clients))
    trainer = _build_trainer(recipe, data, tokenizer, args, raw, encoded, metric_arguments, counts, engine=engine)
    with recipe_errors("data.further_test_splits"):
        further = {
            split: data.task.for_evaluation(data.task.prepare(examples, tokenizer), tokenizer)
            for split, examples in data.further_tests.items()
        }
    return PartyRun(recipe, data, trainer, further)


def build_client(
    recipe: Recipe, client_id: str, output_dir: str | None = None, examples: str | None = None
) -> PartyRun:
    """
    Load the examples and the model of a client, and build its trainer.

    Args:
        recipe ([`Recipe`]): The recipe.
        client_id (`str`): Id of the client.
        output_dir (`str`, *optional*): Output folder of all parties. Overrides `training.output_dir` of the recipe.
        examples (`str`, *optional*): File, folder or Hub id with the examples of the client. Defaults to the part of
            the client in the dataset of the recipe.

    Raises:
        CommandError: If the dataset of the recipe has no client with this id.
        RecipeError: If data or models cannot be loaded, or values are incompatible.
    """
    args = recipe.training_arguments(output_dir=party_folder(recipe, client_id, output_dir))
    data = load_client_data(recipe, client_id, examples)
    tokenizer, task = load_tokenizer(recipe.model), data.task
    fit_encoder(tokenizer, task, data.public)
    raw = {"train_dataset": FederatedDataset.from_dict({client_id: data.train})}
    with incomplete_errors(recipe, examples), command_errors(examples or recipe.data.path):
        encoded = {"train_dataset": task.prepare(raw["train_dataset"], tokenizer)}
    metric_arguments: dict[str, Any] = {}
    if data.test is not None:
        raw["eval_dataset"] = FederatedDataset.from_dict({client_id: data.test})
        with command_errors(examples or recipe.data.path):
            test, metric_arguments = tokenize_test(task, tokenizer, data.test, uses_rows=False)
        encoded["eval_dataset"] = FederatedDataset.from_dict({client_id: test})
    else:
        args.eval_strategy = IntervalStrategy.NO
    counts = listed_counts(recipe, [client_id]) if examples is None else {}
    trainer = _build_trainer(recipe, data, tokenizer, args, raw, encoded, metric_arguments, counts, client_id)
    return PartyRun(recipe, data, trainer, {})


def serve_run(run: PartyRun, folder: RunFolder | None = None, echo: Callable[[str], None] = print) -> dict[str, Any]:
    """
    Run the rounds of a federation, and save the model, its card and the results.

    Args:
        run ([`PartyRun`]): The server.
        folder ([`~hf_federated.experiments.run_folder.RunFolder`], *optional*): The output folder, which determines
            whether the run resumes.
        echo (`Callable`, *optional*): Prints a line.

    Returns:
        `dict`: The content of `results.json`.
    """
    trainer, resume_from = run.trainer, None
    if folder is not None and (resume_from := folder.begin()):
        echo(f"The run resumes from {resume_from}.")
    federated = train_and_evaluate(trainer, run.further_tests, resume_from, has_test=run.data.test is not None)
    del federated["seconds"]
    task = run.data.task
    # Clients hide their numbers with `secure_aggregation`.
    numbers = [number for number in trainer.clients.num_rows.values() if number is not None]
    results = {
        "metric": task.main_metric,
        "lower_is_better": task.lower_is_better,
        "num_train_clients": len(trainer.clients),
        "num_train_rows": sum(numbers) if numbers else None,
        "num_test_rows": 0 if run.data.test is None else len(run.data.test),
        "test_source": run.data.test_source,
        "federated": federated,
    }
    save_outputs(trainer, run.recipe, results)
    for line in _summary(results, task.main_metric):
        echo(line)
    echo(f"The model, its card (README.md) and {RESULTS_NAME} are in {trainer.args.output_dir}.")
    return results


def _build_trainer(
    recipe: Recipe,
    data: PartyData,
    tokenizer: Any,
    args: TrainingArguments,
    raw: dict[str, Any],
    encoded: dict[str, Any],
    metric_arguments: dict[str, Any],
    counts: dict[str, Any],
    client_id: str | None = None,
    engine: NetworkEngine | None = None,
) -> Any:
    model = load_model(recipe.model, data.task, tokenizer, args.seed)
    shared = {
        "processing_class": tokenizer,
        "data_collator": data.task.data_collator(tokenizer, model),
        **metric_arguments,
    }
    client_ids = data.client_ids
    if recipe.client_models and client_id is not None and client_id not in client_ids:
        if len(recipe.client_models) > 1:
            raise CommandError(
                f"network.clients does not contain {client_id!r}, so the entry of client_models for this client is not"
                " known. List the ids of all clients in network.clients."
            )
        client_ids = (client_id,)
    datasets = PartyDatasets(raw, encoded, data.public, data.server)
    arguments = trainer_arguments(recipe, data.task, tokenizer, args, datasets, client_ids, shared)
    if client_id is not None and arguments.get("clients"):
        arguments["clients"] = {client_id: arguments["clients"][client_id]}
    trainer_class: Any = data.task.trainer_class
    federation = build("federation", FederatedConfig, {**recipe.federation, **counts})
    with recipe_errors("federation"):
        return federate(trainer_class)(model=model, args=args, federation=federation, engine=engine, **arguments)


def _summary(results: dict[str, Any], metric: str) -> list[str]:
    """Lines with the metric, the bytes and the duration of a run."""
    federated = results["federated"]
    num_rows = results["num_train_rows"]
    examples = "hidden numbers of examples" if num_rows is None else f"{num_rows} examples"
    lines = [
        f"{results['num_train_clients']} clients with {examples},"
        f" {federated['bytes_up'] / 1e6:.1f} MB from and {federated['bytes_down'] / 1e6:.1f} MB to the clients."
    ]
    title = metric.replace("_", " ").capitalize()
    if metric in federated["metrics"]:
        lines.append(
            f"{title} {federated['metrics'][metric]:.3f} on {results['num_test_rows']} examples"
            f"{results['test_source']}."
        )
    lines += [f"{title} {metrics[metric]:.3f} on {split}." for split, metrics in federated["further_tests"].items()]
    return lines
