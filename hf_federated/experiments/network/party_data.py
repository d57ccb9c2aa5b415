"""The raw examples of one party of a recipe: the server, or a client on its own machine.

The server has test examples, and the examples of the section `public`. It has no training examples. A client has its
training examples, the public examples and, if clients are evaluated, its test examples.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from hf_federated.data.client_ids import similar_ids_hint
from hf_federated.experiments.data.held_out import sample_examples
from hf_federated.experiments.data.incomplete import drop_incomplete
from hf_federated.experiments.data.label_encoding import pooled
from hf_federated.experiments.data.raw import build_task, load_public, load_raw_data, load_server, take_server
from hf_federated.experiments.data.splits import load_examples, load_splits, load_test_path
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.recipe.recipe import SINGLE_CLIENT, Recipe
from hf_federated.experiments.recipe.schema import RecipeError, build
from hf_federated.tasks import Task


TEST = "test"


@dataclass(frozen=True, kw_only=True)
class PartyData:
    """
    The raw examples of a party, without training examples.

    Args:
        task ([`Task`]): The task, with the names of its labels.
        test (`datasets.Dataset`, *optional*): Test examples.
        test_source (`str`): Where the test examples are from, such as `" of the split 'test'"`.
        public (`datasets.Dataset`, *optional*): Public examples, without labels.
        server (`datasets.Dataset`, *optional*): Labeled examples of the server.
        further_tests (`dict[str, datasets.Dataset]`): Additional test examples of the server by split.
        client_ids (`tuple[str, ...]`): Ids of all clients in the order of the recipe, if they are known.
    """

    task: Task
    test: Dataset | None = None
    test_source: str = ""
    public: Dataset | None = None
    server: Dataset | None = None
    further_tests: dict[str, Dataset] = field(default_factory=dict)
    client_ids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClientPartyData(PartyData):
    """
    The raw examples of a client.

    Args:
        train (`datasets.Dataset`): Training examples.
    """

    train: Dataset


def load_server_data(recipe: Recipe, test_examples: str | None = None) -> PartyData:
    """
    Load the examples of the server: `data.test_path`, or the split `data.test_split` of `data.path`.

    Args:
        recipe ([`Recipe`]): The recipe.
        test_examples (`str`, *optional*): Replaces `data.test_path`.

    Raises:
        RecipeError: If examples cannot be loaded, or the server needs the training examples of the clients.
    """
    _check_sections(recipe)
    data = recipe.data
    if test_examples is not None:
        data = dataclasses.replace(data, test_path=test_examples, test_examples=None, test_clients=None)
    elif data.test_path is None and data.test_split is not None:
        data = dataclasses.replace(data, test_path=data.path)
    splits: dict[str, Any] = {}
    source = ""
    if data.test_path is not None:
        examples, source = load_test_path(data.test_path, data.test_split, data.table_options)
        splits[TEST] = examples
    for split in data.further_test_splits:
        splits[split] = load_examples(
            data.path, "data.further_test_splits", [split], is_given=True, options=data.table_options
        )[0]
    splits |= load_server(recipe)
    splits, _ = drop_incomplete(recipe, splits)
    task, splits = _task(recipe, splits)
    server = take_server(recipe, splits)
    sampled = {name: sample_examples(examples, data.max_test_rows, data.seed) for name, examples in splits.items()}
    limited = {name: pooled(examples) for name, examples in sampled.items()}
    return PartyData(
        task=task,
        test=limited.pop(TEST, None),
        test_source=source,
        public=load_public(recipe),
        server=server,
        further_tests=limited,
        client_ids=tuple(recipe.network.clients),
    )


def load_client_data(recipe: Recipe, client_id: str, examples: str | None = None) -> ClientPartyData:
    """
    Load the examples of a client.

    Args:
        recipe ([`Recipe`]): The recipe.
        client_id (`str`): Id of the client.
        examples (`str`, *optional*): File, folder or Hub id with the examples of the client. The split
            `data.train_split` has its training examples. Defaults to the part of the client in the dataset of the
            recipe, which is then loaded whole.

    Raises:
        RecipeError: If examples cannot be loaded, or a client cannot have the public examples.
        CommandError: If the dataset of the recipe has no client with this id.
    """
    by_client = recipe.evaluates_clients
    if examples is None:
        raw = load_raw_data(recipe, by_client)
        if client_id not in raw.train:
            raise CommandError(
                f"--client {client_id!r} is not in the recipe. {similar_ids_hint(client_id, list(raw.train))}"
            )
        tests = raw.test_clients
        test = None if tests is None or client_id not in tests else _dataset(tests[client_id])
        train = _dataset(raw.train[client_id])
        return ClientPartyData(task=raw.task, train=train, test=test, public=raw.public, client_ids=tuple(raw.train))
    _check_sections(recipe)
    data = dataclasses.replace(
        recipe.data,
        path=examples,
        test_path=None,
        test_split=recipe.data.test_split if by_client and recipe.data.test_path is None else None,
        test_examples=None,
        test_clients=None,
        further_test_splits=[],
    )
    loaded = load_splits(dataclasses.replace(recipe, data=data, partition=SINGLE_CLIENT, public=None))
    splits = {name: rows for name, rows in loaded.splits.items() if by_client or name != loaded.test}
    splits, _ = drop_incomplete(recipe, splits)
    task, splits = build_task(recipe, splits)
    test = None if loaded.test is None else splits.get(loaded.test)
    return ClientPartyData(
        task=task,
        train=splits[data.train_split],
        test=test,
        public=load_public(recipe),
        client_ids=tuple(recipe.network.clients),
    )


def _check_sections(recipe: Recipe) -> None:
    for name in ("validation_split", "validation_examples"):
        if getattr(recipe.data, name) is not None:
            raise RecipeError(
                f"data.{name} is set, but the parties of a network have no validation examples. Choose the settings"
                " with `hf-federated benchmark` on one machine, and remove the field."
            )
    if recipe.public is not None and recipe.public.share is not None:
        raise RecipeError(
            "public.share sets aside examples of data.path, which no party of a network has whole. Set public.path to"
            " a file with the public examples, which all parties have."
        )


def _task(recipe: Recipe, splits: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    """Build the task from the splits of the server. Without splits, the recipe must name the labels."""
    if splits:
        return build_task(recipe, splits)
    if missing := recipe.task.missing:
        raise RecipeError(
            f"task.{missing[0]} is not set, and the server has no test examples to read it from. Set the field, or"
            " pass --test-examples."
        )
    return build("task", recipe.task.cls, recipe.task.given), {}


def _dataset(examples: Any) -> Dataset:
    assert isinstance(examples, Dataset), "recipes have no streams"
    return examples
