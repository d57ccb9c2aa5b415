"""The raw rows of a recipe: loaded, sampled, and given to clients. Nothing here knows a tokenizer or a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset, load_dataset_builder

from hf_federated.data import FederatedDataset, FederatedDatasetDict, split_for_distillation
from hf_federated.data.storage.partition_file import PARTITION_FILE
from hf_federated.experiments.data_files import check_one_format, check_one_schema, is_absent, load_file
from hf_federated.experiments.recipe import Recipe, RecipeError, build, recipe_errors
from hf_federated.experiments.recipe_sections import DEFAULT_TEST_CLIENTS, DataSection, PublicSection
from hf_federated.tasks import Task


@dataclass(frozen=True)
class RawRows:
    """
    What a recipe trains and tests on.

    Args:
        train ([`FederatedDataset`]): The clients that train.
        test (`datasets.Dataset`): The rows to test on, of all clients.
        test_clients ([`FederatedDataset`], *optional*): The same rows by client; `None` if they belong to none.
        task ([`Task`]): The task, with the names of its labels.
        num_empty (`int`): Rows that were left out because a text was empty.
        num_without_client (`int`): Rows of the test split that were left out because none of the clients has them.
        public (`datasets.Dataset`, *optional*): Rows without labels that server and clients have.
        server (`datasets.Dataset`, *optional*): The server's own rows, with labels.
        further_tests (`dict[str, datasets.Dataset]`): By split, further rows to test the trained model on.
    """

    train: FederatedDataset
    test: Dataset
    test_clients: FederatedDataset | None
    task: Task
    num_empty: int = 0
    num_without_client: int = 0
    public: Dataset | None = None
    server: Dataset | None = None
    further_tests: dict[str, Dataset] = field(default_factory=dict)


def load_rows(recipe: Recipe, by_client: bool = False) -> RawRows:
    """
    Loads the rows of a recipe, and says whose they are.

    Args:
        recipe ([`Recipe`]): Its sections `data`, `partition` and `task` are read.
        by_client (`bool`, *optional*, defaults to `False`): Whether the rows of a test split have to belong to clients
            too. They are then cut as the training rows are.

    Raises:
        RecipeError: If data, a split or a column does not exist, or no rows or clients are left.
    """
    if recipe.partition is None:
        return _load_federated(recipe)
    data = recipe.data
    splits, num_empty = _load_splits(recipe)
    task, splits = build_task(recipe, splits)
    splits = _sample(splits, data)
    # Nobody's rows: they are cut into no clients.
    further = {split: splits.pop(split) for split in data.further_test_splits}
    if recipe.public is not None:
        splits, public, server = _set_aside(splits, recipe, recipe.public)
        private = dataclasses.replace(recipe, public=None)
        raw = dataclasses.replace(_cut(private, splits, task, num_empty, by_client), public=public, server=server)
    else:
        raw = _cut(recipe, splits, task, num_empty, by_client)
    return dataclasses.replace(raw, further_tests=further)


def _set_aside(
    splits: DatasetDict, recipe: Recipe, section: PublicSection
) -> tuple[DatasetDict, Dataset, Dataset | None]:
    """The splits with what stays private of the training rows, the public rows, and the server's."""
    data = recipe.data
    argument = "tags_column" if hasattr(recipe.task.cls, "tags_column") else "label_column"
    label_column = recipe.task.arguments.get(argument, getattr(recipe.task.cls, argument, "label"))
    with recipe_errors("public"):
        parts = split_for_distillation(
            splits[data.train_split],
            section.share,
            section.server_share,
            label_column,
            section.stratify_by_column,
            data.seed,
        )
    public = _draw(parts.public, section.max_rows, data.seed)
    server = None if parts.server is None else _draw(parts.server, section.max_server_rows, data.seed)
    return DatasetDict({**splits, data.train_split: parts.private}), public, server


def _cut(recipe: Recipe, splits: DatasetDict, task: Task, num_empty: int, by_client: bool) -> RawRows:
    """The rows given to clients, and those to test on."""
    data = recipe.data
    assert recipe.partition is not None
    partitioner = build("partition", recipe.partition.cls, recipe.partition.arguments)
    test_split = data.test_split
    with recipe_errors("partition"):
        if test_split is None:
            clients = FederatedDataset.from_dataset(splits[data.train_split], partitioner)
        elif by_client:
            cut = FederatedDatasetDict.from_dataset(splits, partitioner)
            train, test = _at_most(cut[data.train_split], data), cut[test_split].to_dataset()
            return RawRows(train, test, cut[test_split], task, num_empty, len(splits[test_split]) - len(test))
        else:
            train = _at_most(FederatedDataset.from_dataset(splits[data.train_split], partitioner), data)
            return RawRows(train, splits[test_split], None, task, num_empty)
    train, test = _hold_out(clients, data)
    return RawRows(train, test.to_dataset(), test, task, num_empty)


def _load_splits(recipe: Recipe) -> tuple[DatasetDict, int]:
    """The splits that the recipe names, without rows whose texts are empty if it says so, and how many those were."""
    data, path = recipe.data, Path(recipe.data.path)
    wanted = [data.train_split, *_test_splits(data)]
    with recipe_errors("data.path"):
        if is_absent(data.path):
            raise RecipeError(f"data.path: there is no file or folder {data.path}.")
        if (path / PARTITION_FILE).is_file():
            raise RecipeError(f"partition: {data.path} is cut into clients already; leave the section out.")
        if path.is_file():
            if len(wanted) > 1:
                raise RecipeError(f"data: {data.path} is one file, which has one split, and not {wanted[1]!r} too.")
            loaded = load_file(path, data.train_split)
        else:
            if path.is_dir():
                check_one_format(path)
                check_one_schema(path)
            # Of a folder whose card names its files, `datasets` goes on reading what it read first, also when that was
            # another folder of the same name. Of files that are named to it, it notices when they change.
            files = _files_of(data) if path.is_dir() else None
            parts = load_dataset(data.path, data.name, data_files=files, revision=data.revision, split=wanted)
            loaded = DatasetDict(dict(zip(wanted, parts, strict=True)))
    before = sum(map(len, loaded.values()))
    if data.drop_empty:
        task = _nameless_task(recipe)
        with recipe_errors("task"):
            loaded = loaded.filter(lambda batch: [not empty for empty in task.find_empty(batch)], batched=True)
    for split, rows in loaded.items():
        if not len(rows):
            raise RecipeError(f"data.path: no row is left of the split {split!r} of {data.path}.")
    return loaded, before - sum(map(len, loaded.values()))


def _files_of(data: DataSection) -> dict[str, list[str]]:
    """The files of each split of a folder."""
    found = load_dataset_builder(data.path, data.name).config.data_files or {}
    return {str(split): list(map(str, paths)) for split, paths in found.items()}


def _nameless_task(recipe: Recipe) -> Task:
    """The task before the names of its labels are known."""
    names: dict[str, Any] = {name: ["0"] for name in ("label_names", "tag_names") if name in _fields(recipe.task.cls)}
    given = {key: value for key, value in recipe.task.arguments.items() if value is not None}
    return build("task", recipe.task.cls, {**names, **given})


def _fields(cls: type) -> list[str]:
    return [item.name for item in dataclasses.fields(cls)]


def build_task(recipe: Recipe, splits: DatasetDict) -> tuple[Task, DatasetDict]:
    """
    The recipe's task, with names of labels from the rows where the recipe leaves them out.

    Args:
        recipe ([`Recipe`]): The recipe.
        splits (`datasets.DatasetDict`): The raw rows, the training split first.

    Returns:
        `tuple[Task, datasets.DatasetDict]`: The task, and the rows; numbers that are labels have become a
        `ClassLabel`, which names them.

    Raises:
        RecipeError: If a column does not exist, or labels have no names and cannot be given any.
    """
    cls, rows = recipe.task.cls, next(iter(splits.values()))
    arguments = {key: value for key, value in recipe.task.arguments.items() if value is not None}
    unnamed = [name for name in ("label_names", "tag_names") if name in _fields(cls) and name not in arguments]
    column = arguments.get("label_column", "label")
    if unnamed == ["label_names"] and not isinstance(rows.features.get(column), (ClassLabel, type(None))):
        splits = _name_labels(splits, column)
        rows = next(iter(splits.values()))
    _check_order(rows, cls, arguments)
    with recipe_errors("task"):
        task: Task = cls.from_dataset(rows, **arguments) if unnamed else cls(**arguments)
    for column in task.columns:
        if column not in rows.column_names:
            raise RecipeError(f"task: there is no column {column!r}; the columns are {', '.join(rows.column_names)}.")
    return task, splits


def _check_order(rows: Dataset, cls: type, arguments: dict[str, Any]) -> None:
    """Names that are given and those that the data have, where both have one, must stand for the same number."""
    for given, column_name in (("label_names", "label_column"), ("tag_names", "tags_column")):
        if given not in arguments or given not in _fields(cls):
            continue
        default = next(item.default for item in dataclasses.fields(cls) if item.name == column_name)
        feature = rows.features.get(arguments.get(column_name, default))
        feature = getattr(feature, "feature", feature)
        names = feature.names if isinstance(feature, ClassLabel) else []
        for number, name in enumerate(arguments[given]):
            if name in names and names.index(name) != number:
                raise RecipeError(
                    f"task.{given}: {name!r} is number {number} here, and {names.index(name)} in the data. Leave the"
                    f" names out, or give them in the data's order: {', '.join(names)}."
                )


def _name_labels(splits: DatasetDict, column: str) -> DatasetDict:
    """The same rows with the values of a column, sorted by value, as a `ClassLabel`."""
    with recipe_errors(f"task: labels of the column {column!r}"):
        found = sorted({value for rows in splits.values() for value in rows.unique(column) if value is not None})
        if any(isinstance(value, float) and not value.is_integer() for value in found):
            raise RecipeError(f"task: the column {column!r} holds fractions, which are no labels.")
        number_of = {value: number for number, value in enumerate(found)}
        if found and list(number_of) != list(range(len(found))) and not isinstance(found[0], str):
            splits = splits.map(
                lambda values: {column: [None if value is None else number_of[value] for value in values]},
                input_columns=column,
                batched=True,
            )
        return splits.cast_column(column, ClassLabel(names=[str(value) for value in found]))


def _sample(splits: DatasetDict, data: DataSection) -> DatasetDict:
    """At most so many rows of each split as the recipe says, drawn with its seed, in the order they had."""
    sampled = DatasetDict(splits)
    sampled[data.train_split] = _draw(splits[data.train_split], data.max_train_rows, data.seed)
    for split in _test_splits(data):
        sampled[split] = _draw(splits[split], data.max_test_rows, data.seed)
    return sampled


def _test_splits(data: DataSection) -> list[str]:
    return [*filter(None, (data.test_split,)), *data.further_test_splits]


def _draw(rows: Dataset, most: int | None, seed: int) -> Dataset:
    """At most so many rows, in the order they had."""
    if most is None or most >= len(rows):
        return rows
    return rows.select(np.sort(np.random.default_rng(seed).choice(len(rows), most, replace=False)))


def _load_federated(recipe: Recipe) -> RawRows:
    """Clients that were saved or pushed."""
    data = recipe.data
    for name in ("max_train_rows", "max_test_rows", "name"):
        if getattr(data, name) is not None:
            raise RecipeError(f"data.{name} is for rows that the recipe's partition cuts; leave it out.")
    if data.drop_empty:
        raise RecipeError("data.drop_empty is for rows that the recipe's partition cuts; leave it out.")
    with recipe_errors("data.path"):
        if is_absent(data.path):
            raise RecipeError(f"data.path: there is no file or folder {data.path}.")
        if Path(data.path).exists() and not (Path(data.path) / PARTITION_FILE).is_file():
            raise RecipeError(
                f"partition is missing, and {data.path} does not say whose its rows are. Name a partitioner, or give a"
                " federated data set."
            )
        if Path(data.path).exists():
            splits = FederatedDatasetDict.load_from_disk(data.path)
        else:
            splits = FederatedDatasetDict.from_hub(data.path, revision=data.revision)
    for split in (data.train_split, *_test_splits(data)):
        if split not in splits:
            raise RecipeError(f"data: {data.path} has no split {split!r}; it has {', '.join(splits)}.")
    clients = splits[data.train_split]
    names = DatasetDict({data.train_split: clients.to_dataset()})
    task, named = build_task(recipe, names)
    if named is not names:
        raise RecipeError(
            f"task.label_names is missing: the labels of {data.path} are {clients.features}, which have no names."
        )
    if data.test_split is None:
        train, test = _hold_out(clients, data)
    else:
        train, test = _at_most(clients, data), splits[data.test_split]
    further = {split: splits[split].to_dataset() for split in data.further_test_splits}
    return RawRows(train, test.to_dataset(), test, task, further_tests=further)


def _at_most(clients: FederatedDataset, data: DataSection) -> FederatedDataset:
    """At most `max_clients` of the clients, drawn with the recipe's seed, in the order of the data set."""
    if data.max_clients is None:
        return clients
    return _first(clients, _shuffled(clients, data)[: data.max_clients])


def _hold_out(clients: FederatedDataset, data: DataSection) -> tuple[FederatedDataset, FederatedDataset]:
    """
    Clients to train on and to test on.

    The held-out clients and, with `max_clients`, the training clients are the first of one permutation of all clients
    that `data.seed` decides.
    """
    wanted = DEFAULT_TEST_CLIENTS if data.test_clients is None else data.test_clients
    num_test = max(1, round(wanted * len(clients))) if isinstance(wanted, float) else wanted
    if num_test >= len(clients):
        raise RecipeError(f"data.test_clients holds out {num_test} of {len(clients)} clients; none is left to train.")
    order = _shuffled(clients, data)
    return _first(clients, order[num_test:][: data.max_clients]), _first(clients, order[:num_test])


def _shuffled(clients: FederatedDataset, data: DataSection) -> list[str]:
    ids = list(clients)
    return [ids[position] for position in np.random.default_rng(data.seed).permutation(len(ids))]


def _first(clients: FederatedDataset, chosen: list[str]) -> FederatedDataset:
    """Chosen clients in the order of the data set, so that results do not hang on how they were drawn."""
    return clients.select_clients([client_id for client_id in clients if client_id in set(chosen)])
