"""The arguments of a federated trainer for the datasets, the task and the client models of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import TrainingArguments

from hf_federated.aggregation import build_aggregation
from hf_federated.distillation import build_distillation
from hf_federated.experiments.data.tokenized import TokenizedData
from hf_federated.experiments.model_loading import load_client_specs
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import recipe_errors
from hf_federated.tasks import Task


@dataclass(frozen=True)
class PartyDatasets:
    """
    The datasets of a party, which is a run in one process, the server, or one client.

    Args:
        raw (`Mapping[str, Any]`): Raw examples by argument of the trainer: `train_dataset` and `eval_dataset`.
        encoded (`Mapping[str, Any]`): The same examples, encoded.
        public (`datasets.Dataset`, *optional*): Raw public examples, without labels.
        server (`datasets.Dataset`, *optional*): Raw labeled examples of the server.
    """

    raw: Mapping[str, Any]
    encoded: Mapping[str, Any]
    public: Dataset | None = None
    server: Dataset | None = None


def dataset_arguments(
    recipe: Recipe, data: TokenizedData, tokenizer: Any, args: TrainingArguments, shared: Mapping[str, Any]
) -> dict[str, Any]:
    """
    Build the arguments of [`trainer_arguments`] for a run in one process.

    Args:
        recipe ([`Recipe`]): The recipe.
        data ([`~hf_federated.experiments.data.tokenized.TokenizedData`]): The data of the recipe.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the server's model.
        args (`TrainingArguments`): The training arguments.
        shared (`Mapping[str, Any]`): Arguments of a trainer on encoded examples.

    Raises:
        RecipeError: If the method or the public examples cannot be used.
    """
    raw, by_client = data.raw, data.test_clients is not None
    datasets = PartyDatasets(
        raw={"train_dataset": raw.train, "eval_dataset": raw.test_clients if by_client else raw.test},
        encoded={"train_dataset": data.train, "eval_dataset": data.test_clients if by_client else data.test},
        public=raw.public,
        server=raw.server,
    )
    return trainer_arguments(recipe, data.task, tokenizer, args, datasets, list(raw.train), shared)


def trainer_arguments(
    recipe: Recipe,
    task: Task,
    tokenizer: Any,
    args: TrainingArguments,
    datasets: PartyDatasets,
    client_ids: Sequence[str],
    shared: Mapping[str, Any],
) -> dict[str, Any]:
    """
    Build the arguments of the trainer for datasets, tokenizer, task and client models.

    Args:
        recipe ([`Recipe`]): The recipe.
        task ([`Task`]): The task, with the names of its labels.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the server's model.
        args (`TrainingArguments`): The training arguments.
        datasets ([`PartyDatasets`]): The datasets of the party.
        client_ids (`Sequence[str]`): Ids of all clients, in the order in which `client_models` are assigned.
        shared (`Mapping[str, Any]`): Arguments of a trainer on encoded examples.

    Raises:
        RecipeError: If the method or the public examples cannot be used.
    """
    with recipe_errors("federation"):
        kwargs = recipe.federation.get("distillation_kwargs")
        method = build_distillation(recipe.federation.get("distillation"), kwargs)
        aggregation = build_aggregation(
            recipe.federation.get("aggregation", "fedavg"), recipe.federation.get("aggregation_kwargs")
        )
    if method is None or not method.requirements.public_dataset:
        # Drop the examples that are set aside, so runs with and without distillation train on the same private
        # examples.
        server = datasets.server if aggregation.trains_on_server else None
        datasets = dataclasses.replace(datasets, public=None, server=server)
    if recipe.client_models or (datasets.public is not None and task.prediction_unit != "row"):
        # Clients tokenize raw examples with their own tokenizers. The task determines the positions of predictions.
        return {
            "processing_class": tokenizer,
            "task": task,
            "public_dataset": datasets.public,
            "server_dataset": datasets.server,
            "clients": load_client_specs(recipe, task, args, client_ids, tokenizer) if recipe.client_models else {},
            **datasets.raw,
        }
    with recipe_errors("public"):
        public = None if datasets.public is None else task.prepare(datasets.public, tokenizer, with_labels=False)
        server = None if datasets.server is None else task.prepare(datasets.server, tokenizer)
    return {"public_dataset": public, "server_dataset": server, **datasets.encoded, **shared}
