"""Load, sample and partition the raw examples of a recipe, without a tokenizer or a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset, load_dataset_builder

from hf_federated.data import FederatedDataset, FederatedDatasetDict, split_for_distillation
from hf_federated.data.storage.partition_file import PARTITION_FILE
from hf_federated.experiments.data_files import check_same_schema, check_single_format, is_missing_path, load_file
from hf_federated.experiments.recipe import ClassSection, Recipe, RecipeError, build, recipe_errors
from hf_federated.experiments.recipe_sections import DEFAULT_TEST_CLIENTS, DataSection, PublicSection
from hf_federated.tasks import Task


@dataclass(frozen=True)
class RawData:
    """
    The raw examples that a recipe uses for training and testing.

    Args:
        train ([`FederatedDataset`]): The training clients.
        test (`datasets.Dataset`): The test examples of all clients.
        test_clients ([`FederatedDataset`], *optional*): The test examples by client. `None` if the test examples are
            not assigned to clients.
        task ([`Task`]): The task, with the names of its labels.
        num_empty (`int`): Number of examples that were dropped because a text was empty.
        num_without_client (`int`): Number of examples of the test split that were dropped because no client has them.
        public (`datasets.Dataset`, *optional*): Examples without labels that the server and all clients hold.
        server (`datasets.Dataset`, *optional*): Examples with labels that only the server holds.
        further_tests (`dict[str, datasets.Dataset]`): Additional test examples by split.
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


def load_raw_data(recipe: Recipe, by_client: bool = False) -> RawData:
    """
    Load the examples of a recipe and assign them to clients.

    Args:
        recipe ([`Recipe`]): The recipe. The sections `data`, `partition`, `task` and `public` are used.
        by_client (`bool`, *optional*, defaults to `False`): Whether the examples of a test split are also assigned to
            clients. They are then partitioned in the same way as the training examples.

    Raises:
        RecipeError: If the dataset, a split or a column does not exist, or no examples or clients remain.
    """
    data = recipe.data
    with recipe_errors("data.path"):
        if is_missing_path(data.path):
            raise RecipeError(f"data.path: the file or folder {data.path} does not exist.")
    if recipe.partition is None:
        return _load_federated(recipe)
    splits, num_empty = _load_splits(recipe)
    task, splits = build_task(recipe, splits)
    splits = _sample(splits, data)
    # Additional test splits are not partitioned.
    further_tests = {split: splits.pop(split) for split in data.further_test_splits}
    public = server = None
    if recipe.public is not None:
        splits, public, server = _set_aside_public(splits, recipe, recipe.public)
    raw = _partition(recipe.partition, data, splits, task, num_empty, by_client)
    return dataclasses.replace(raw, public=public, server=server, further_tests=further_tests)


def _set_aside_public(
    splits: DatasetDict, recipe: Recipe, section: PublicSection
) -> tuple[DatasetDict, Dataset, Dataset | None]:
    """Return the splits without the examples that are set aside, the public examples, and the server's examples."""
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
    public = _sample_examples(parts.public, section.max_rows, data.seed)
    server = None if parts.server is None else _sample_examples(parts.server, section.max_server_rows, data.seed)
    return DatasetDict({**splits, data.train_split: parts.private}), public, server


def _partition(
    section: ClassSection, data: DataSection, splits: DatasetDict, task: Task, num_empty: int, by_client: bool
) -> RawData:
    """Partition the training examples, and select the test examples."""
    partitioner = build("partition", section.cls, section.arguments)
    test_split = data.test_split
    with recipe_errors("partition"):
        if test_split is None:
            clients = FederatedDataset.from_dataset(splits[data.train_split], partitioner)
        elif by_client:
            federated = FederatedDatasetDict.from_dataset(splits, partitioner)
            train, test = _limit_clients(federated[data.train_split], data), federated[test_split].to_dataset()
            return RawData(train, test, federated[test_split], task, num_empty, len(splits[test_split]) - len(test))
        else:
            train = _limit_clients(FederatedDataset.from_dataset(splits[data.train_split], partitioner), data)
            return RawData(train, splits[test_split], None, task, num_empty)
    train, test = _hold_out(clients, data)
    return RawData(train, test.to_dataset(), test, task, num_empty)


def _load_splits(recipe: Recipe) -> tuple[DatasetDict, int]:
    """Load the splits of a recipe, without empty examples if requested, and count the empty examples."""
    data, path = recipe.data, Path(recipe.data.path)
    names = [data.train_split, *_test_splits(data)]
    with recipe_errors("data.path"):
        if (path / PARTITION_FILE).is_file():
            raise RecipeError(f"partition: {data.path} is already partitioned. Remove the section.")
        if path.is_file():
            if len(names) > 1:
                raise RecipeError(
                    f"data: {data.path} is a file with one split, so the split {names[1]!r} does not exist. Use a"
                    " folder."
                )
            loaded = load_file(path, data.train_split)
        else:
            if path.is_dir():
                check_single_format(path)
                check_same_schema(path)
            # If the card of a folder lists the data files, `datasets` reuses its cache even if the files change or
            # another folder has the same name. With explicit `data_files`, it detects changes.
            files = _files_of(data) if path.is_dir() else None
            parts = load_dataset(data.path, data.name, data_files=files, revision=data.revision, split=names)
            loaded = DatasetDict(dict(zip(names, parts, strict=True)))
    before = sum(map(len, loaded.values()))
    if data.drop_empty:
        task = _task_without_label_names(recipe)
        with recipe_errors("task"):
            loaded = loaded.filter(lambda batch: [not empty for empty in task.find_empty(batch)], batched=True)
    for split, dataset in loaded.items():
        if not len(dataset):
            raise RecipeError(f"data.path: no example remains of the split {split!r} of {data.path}.")
    return loaded, before - sum(map(len, loaded.values()))


def _files_of(data: DataSection) -> dict[str, list[str]]:
    """The data files of each split of a folder."""
    found = load_dataset_builder(data.path, data.name).config.data_files or {}
    return {str(split): list(map(str, paths)) for split, paths in found.items()}


def _task_without_label_names(recipe: Recipe) -> Task:
    """Build the task with placeholders for unknown label names."""
    names: dict[str, Any] = {name: ["0"] for name in ("label_names", "tag_names") if name in _fields(recipe.task.cls)}
    given = {key: value for key, value in recipe.task.arguments.items() if value is not None}
    return build("task", recipe.task.cls, {**names, **given})


def _fields(cls: type) -> list[str]:
    return [item.name for item in dataclasses.fields(cls)]


def build_task(recipe: Recipe, splits: DatasetDict) -> tuple[Task, DatasetDict]:
    """
    Build the task of a recipe. Label names that the recipe does not set are read from the data.

    Args:
        recipe ([`Recipe`]): The recipe.
        splits (`datasets.DatasetDict`): The raw examples, with the training split first.

    Returns:
        `tuple[Task, datasets.DatasetDict]`: The task and the examples. A label column without names is converted to
        `ClassLabel`.

    Raises:
        RecipeError: If a column does not exist, or the label names cannot be determined.
    """
    cls, dataset = recipe.task.cls, next(iter(splits.values()))
    arguments = {key: value for key, value in recipe.task.arguments.items() if value is not None}
    unnamed = [name for name in ("label_names", "tag_names") if name in _fields(cls) and name not in arguments]
    column = arguments.get("label_column", "label")
    if unnamed == ["label_names"] and not isinstance(dataset.features.get(column), (ClassLabel, type(None))):
        splits = _name_labels(splits, column)
        dataset = next(iter(splits.values()))
    _check_label_order(dataset, cls, arguments)
    with recipe_errors("task"):
        task: Task = cls.from_dataset(dataset, **arguments) if unnamed else cls(**arguments)
    for column in task.columns:
        if column not in dataset.column_names:
            raise RecipeError(
                f"task: the column {column!r} does not exist. The columns are {', '.join(dataset.column_names)}."
            )
    return task, splits


def _check_label_order(dataset: Dataset, cls: type, arguments: dict[str, Any]) -> None:
    """Check that label names in the recipe and in the dataset refer to the same label ids."""
    for given, column_name in (("label_names", "label_column"), ("tag_names", "tags_column")):
        if given not in arguments or given not in _fields(cls):
            continue
        default = next(item.default for item in dataclasses.fields(cls) if item.name == column_name)
        feature = dataset.features.get(arguments.get(column_name, default))
        feature = getattr(feature, "feature", feature)
        names = feature.names if isinstance(feature, ClassLabel) else []
        for number, name in enumerate(arguments[given]):
            if name in names and names.index(name) != number:
                raise RecipeError(
                    f"task.{given}: {name!r} is label {number} in the recipe and label {names.index(name)} in the"
                    f" data. Remove the field, or use the order of the data: {', '.join(names)}."
                )


def _name_labels(splits: DatasetDict, column: str) -> DatasetDict:
    """Convert a column to `ClassLabel`, with its sorted values as label names."""
    with recipe_errors(f"task: labels of the column {column!r}"):
        found = sorted({value for dataset in splits.values() for value in dataset.unique(column) if value is not None})
        if any(isinstance(value, float) and not value.is_integer() for value in found):
            raise RecipeError(f"task: the column {column!r} has values that are not integers, which cannot be labels.")
        number_of = {value: number for number, value in enumerate(found)}
        if found and list(number_of) != list(range(len(found))) and not isinstance(found[0], str):
            splits = splits.map(
                lambda values: {column: [None if value is None else number_of[value] for value in values]},
                input_columns=column,
                batched=True,
            )
        return splits.cast_column(column, ClassLabel(names=[str(value) for value in found]))


def _sample(splits: DatasetDict, data: DataSection) -> DatasetDict:
    """Sample at most `max_train_rows` and `max_test_rows` examples of the splits with `data.seed`."""
    sampled = DatasetDict(splits)
    sampled[data.train_split] = _sample_examples(splits[data.train_split], data.max_train_rows, data.seed)
    for split in _test_splits(data):
        sampled[split] = _sample_examples(splits[split], data.max_test_rows, data.seed)
    return sampled


def _test_splits(data: DataSection) -> list[str]:
    return [*filter(None, (data.test_split,)), *data.further_test_splits]


def _sample_examples(dataset: Dataset, maximum: int | None, seed: int) -> Dataset:
    """Sample at most `maximum` examples and keep their order."""
    if maximum is None or maximum >= len(dataset):
        return dataset
    return dataset.select(np.sort(np.random.default_rng(seed).choice(len(dataset), maximum, replace=False)))


def _load_federated(recipe: Recipe) -> RawData:
    """Load a federated dataset from a folder or the Hub."""
    data = recipe.data
    for name in ("max_train_rows", "max_test_rows", "name", "drop_empty"):
        if getattr(data, name) not in (None, False):
            raise RecipeError(f"data.{name} is set without partition. Only recipes with a partition accept it.")
    with recipe_errors("data.path"):
        if Path(data.path).exists() and not (Path(data.path) / PARTITION_FILE).is_file():
            raise RecipeError(
                f"partition is missing, and {data.path} is not a federated dataset. Set partition, or use a federated"
                " dataset."
            )
        if Path(data.path).exists():
            splits = FederatedDatasetDict.load_from_disk(data.path)
        else:
            splits = FederatedDatasetDict.from_hub(data.path, revision=data.revision)
    for split in (data.train_split, *_test_splits(data)):
        if split not in splits:
            raise RecipeError(f"data: {data.path} has no split {split!r}. Its splits are {', '.join(splits)}.")
    clients = splits[data.train_split]
    train_only = DatasetDict({data.train_split: clients.to_dataset()})
    task, with_label_names = build_task(recipe, train_only)
    if with_label_names is not train_only:
        raise RecipeError(
            f"task.label_names is missing, and {data.path} has no label names. Its features are {clients.features}."
        )
    if data.test_split is None:
        train, test = _hold_out(clients, data)
    else:
        train, test = _limit_clients(clients, data), splits[data.test_split]
    further_tests = {split: splits[split].to_dataset() for split in data.further_test_splits}
    return RawData(train, test.to_dataset(), test, task, further_tests=further_tests)


def _limit_clients(clients: FederatedDataset, data: DataSection) -> FederatedDataset:
    """Sample at most `max_clients` clients with `data.seed` and keep the order of the dataset."""
    if data.max_clients is None:
        return clients
    return _select_clients(clients, _shuffled(clients, data)[: data.max_clients])


def _hold_out(clients: FederatedDataset, data: DataSection) -> tuple[FederatedDataset, FederatedDataset]:
    """
    Split the clients into training clients and held-out test clients.

    `data.seed` determines one permutation of all clients. The first clients of the permutation are held out. With
    `max_clients`, the next clients of the permutation are the training clients.
    """
    test_clients = DEFAULT_TEST_CLIENTS if data.test_clients is None else data.test_clients
    num_test = max(1, round(test_clients * len(clients))) if isinstance(test_clients, float) else test_clients
    if num_test >= len(clients):
        raise RecipeError(
            f"data.test_clients holds out {num_test} of {len(clients)} clients. At least one client must remain for"
            " training."
        )
    order = _shuffled(clients, data)
    return _select_clients(clients, order[num_test:][: data.max_clients]), _select_clients(clients, order[:num_test])


def _shuffled(clients: FederatedDataset, data: DataSection) -> list[str]:
    ids = list(clients)
    return [ids[position] for position in np.random.default_rng(data.seed).permutation(len(ids))]


def _select_clients(clients: FederatedDataset, chosen: list[str]) -> FederatedDataset:
    """Select clients in the order of the dataset, so that results do not depend on the order of sampling."""
    return clients.select_clients([client_id for client_id in clients if client_id in set(chosen)])
