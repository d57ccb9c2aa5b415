"""The tokenized data of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset

from hf_federated.data import FederatedDataset
from hf_federated.experiments.cached_features import fit_encoder
from hf_federated.experiments.data.incomplete import incomplete_errors
from hf_federated.experiments.data.raw import RawData, load_raw_data
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import RecipeError, recipe_errors
from hf_federated.experiments.scoring import EvaluatedExamples
from hf_federated.tasks import Seq2Seq, Task


@dataclass(frozen=True)
class TokenizedData:
    """
    The tokenized data of a recipe.

    Args:
        raw ([`RawData`]): The raw examples.
        train ([`FederatedDataset`]): The tokenized training clients.
        test (`datasets.Dataset`): The tokenized test examples, sorted by length to minimize padding.
        test_clients ([`FederatedDataset`], *optional*): The tokenized test examples by client, if requested.
        metric_arguments (`dict`): The arguments of a `Trainer` that compute metrics from predictions.
        test_rows (`datasets.Dataset`): The raw test examples, in the order of the predictions for `test`.
        further_tests (`dict[str, datasets.Dataset]`): Additional tokenized test examples by split.
    """

    raw: RawData
    train: FederatedDataset
    test: Dataset
    test_clients: FederatedDataset | None
    metric_arguments: dict[str, Any]
    test_rows: Dataset
    further_tests: dict[str, Dataset] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """The task, with the names of its labels."""
        return self.raw.task


def load_tokenized_data(recipe: Recipe, tokenizer: Any, by_client: bool = False) -> TokenizedData:
    """
    Load the data of a recipe and tokenize it, separately for each client.

    Args:
        recipe ([`Recipe`]): The recipe.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        by_client (`bool`, *optional*, defaults to `False`): Whether to also return the test examples by client.

    Raises:
        RecipeError: If the data cannot be loaded, or the task cannot process an example.
    """
    needs_rows = recipe.task.cls.needs_rows
    # The metrics of sequence-to-sequence tasks use the raw targets, if these are available.
    uses_rows = needs_rows or issubclass(recipe.task.cls, Seq2Seq)
    unsupported = {
        "federation.evaluate_clients": by_client and needs_rows,
        "data.further_test_splits": bool(recipe.data.further_test_splits) and uses_rows,
    }
    for name, is_set in unsupported.items():
        if is_set:
            raise RecipeError(
                f"{name} is not supported for {recipe.task.name}, whose metrics need the raw examples. Remove the"
                " field."
            )
    with incomplete_errors(recipe):
        return _tokenize(recipe, tokenizer, load_raw_data(recipe, by_client), by_client)


def _tokenize(recipe: Recipe, tokenizer: Any, raw: RawData, by_client: bool) -> TokenizedData:
    """Tokenize raw examples, separately for each client."""
    task = raw.task
    fit_encoder(tokenizer, task, raw.public, raw.train)
    with recipe_errors(f"data: {recipe.data.path}"):
        train = task.prepare(raw.train, tokenizer)
        test_clients = None
        if by_client and raw.test_clients is not None:
            clients = task.prepare(raw.test_clients, tokenizer)
            evaluated = {client_id: task.for_evaluation(client, tokenizer) for client_id, client in clients.items()}
            test_clients = FederatedDataset.from_dict(evaluated)
        further_tests = {
            split: task.for_evaluation(task.prepare(dataset, tokenizer), tokenizer)
            for split, dataset in raw.further_tests.items()
        }
    test = encode_evaluated(task, tokenizer, raw.test)
    # Metrics by client use only the labels, and no raw examples.
    arguments = _metric_arguments(task, tokenizer, test, uses_rows=test_clients is None)
    return TokenizedData(raw, train, test.features, test_clients, arguments, test.rows, further_tests)


def tokenize_test(
    task: Task, tokenizer: Any, examples: Dataset, uses_rows: bool = True
) -> tuple[Dataset, dict[str, Any]]:
    """
    Tokenize test examples, and sort them by length to minimize padding.

    Args:
        task ([`Task`]): The task, with the names of its labels.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        examples (`datasets.Dataset`): The raw examples.
        uses_rows (`bool`, *optional*, defaults to `True`): Whether metrics may use the raw examples.

    Returns:
        `tuple[datasets.Dataset, dict[str, Any]]`: The tokenized examples, and the arguments of a `Trainer` that
        compute metrics from predictions.

    Raises:
        RecipeError: If the task cannot process an example.
    """
    test = encode_evaluated(task, tokenizer, examples)
    return test.features, _metric_arguments(task, tokenizer, test, uses_rows)


def encode_evaluated(task: Task, tokenizer: Any, examples: Dataset) -> EvaluatedExamples:
    """
    Tokenize examples for an evaluation, sorted by length to minimize padding.

    Args:
        task ([`Task`]): The task, with the names of its labels.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        examples (`datasets.Dataset`): The raw examples.

    Raises:
        RecipeError: If the task cannot process an example.
    """
    with recipe_errors("data"):
        features = task.for_evaluation(task.prepare(examples, tokenizer), tokenizer)
    # All feature vectors have one length.
    has_tokens = "input_ids" in features.column_names
    lengths = [len(ids) for ids in features["input_ids"]] if has_tokens else [0] * len(features)
    order = np.argsort(lengths, kind="stable")
    # Tasks with several features for an example find the example of a feature by its id.
    rows = examples.select(order) if len(features) == len(examples) else examples
    return EvaluatedExamples(features.select(order), rows)


def _metric_arguments(task: Task, tokenizer: Any, test: EvaluatedExamples, uses_rows: bool) -> dict[str, Any]:
    with recipe_errors("data"):
        rows = test.rows if uses_rows else None
        compute_metrics = task.build_compute_metrics(tokenizer, features=test.features, rows=rows)
    return {
        "compute_metrics": compute_metrics,
        "preprocess_logits_for_metrics": task.preprocess_logits_for_metrics,
    }
