"""Load, sample and partition the raw examples of a recipe, without a tokenizer or a model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, DatasetDict

from hf_federated.data import FederatedDataset, FederatedDatasetDict, NaturalPartitioner, split_for_distillation
from hf_federated.experiments.data.files import label_names
from hf_federated.experiments.data.held_out import (
    hold_out_clients,
    hold_out_examples,
    limit_clients,
    limit_examples,
    sample_examples,
)
from hf_federated.experiments.data.incomplete import drop_incomplete
from hf_federated.experiments.data.label_encoding import check_column, encode_labels, label_column, pooled
from hf_federated.experiments.data.splits import (
    RawSplits,
    load_examples,
    load_federated_splits,
    load_splits,
    task_without_label_names,
)
from hf_federated.experiments.data.validation import hold_out_validation, without_test_splits
from hf_federated.experiments.recipe.recipe import ClassSection, Recipe
from hf_federated.experiments.recipe.schema import RecipeError, build, recipe_errors
from hf_federated.experiments.recipe.sections import DEFAULT_TEST_EXAMPLES, PublicSection
from hf_federated.experiments.text import plural
from hf_federated.tasks import Task


# Splits that are used of `public.path` and `public.server_path`. The first one that exists is used.
PUBLIC_SPLITS = ("train", "public")
# The key of the examples of `public.server_path`.
SERVER_PATH = "server_path"


@dataclass(frozen=True)
class RawData:
    """
    The raw examples that a recipe uses for training and testing.

    Args:
        train ([`FederatedDataset`]): The training clients.
        test (`datasets.Dataset`): The test examples of all clients.
        test_clients ([`FederatedDataset`], *optional*): The test examples by client. `None` if the test examples are
            not assigned to clients.
        test_source (`str`): Where the test examples are from, such as `" of the split 'test'"`.
        holds_out_clients (`bool`): Whether the test examples are all examples of clients that do not train.
        note (`str`): A sentence about test examples that the run does not use.
        task ([`Task`]): The task, with the names of its labels.
        num_empty (`int`): Number of examples that were dropped because a text was empty.
        incomplete (`dict[str, int]`): Number of examples without a text, a label or a client that were dropped, by
            client or by split.
        num_without_client (`int`): Number of examples of the test split that were dropped because no client has them.
        public (`datasets.Dataset`, *optional*): Examples without labels that the server and all clients hold.
        server (`datasets.Dataset`, *optional*): Examples with labels that only the server holds.
        further_tests (`dict[str, datasets.Dataset]`): Additional test examples by split.
        validation (`datasets.Dataset`, *optional*): The validation examples of a run that is evaluated on test
            examples, if the recipe has any. A run with `data.evaluate_on: validation` has the same examples in `test`.
    """

    train: FederatedDataset
    test: Dataset
    test_clients: FederatedDataset | None
    task: Task
    test_source: str = ""
    holds_out_clients: bool = False
    note: str = ""
    num_empty: int = 0
    incomplete: dict[str, int] = field(default_factory=dict)
    num_without_client: int = 0
    public: Dataset | None = None
    server: Dataset | None = None
    further_tests: dict[str, Dataset] = field(default_factory=dict)
    validation: Dataset | None = None


def load_raw_data(recipe: Recipe, by_client: bool = False) -> RawData:
    """
    Load the examples of a recipe and assign them to clients.

    The test examples are the first of these: the examples that `data.test_path` or `data.test_split` names; clients or
    examples that `data.test_clients` or `data.test_examples` holds out; the split `test` or `validation`, if the data
    has one; a tenth of the examples of each client.

    With `data.evaluate_on: validation`, the validation examples take the place of the test examples. A test split is
    then not loaded, and held-out test examples are left out.

    Args:
        recipe ([`Recipe`]): The recipe. The sections `data`, `partition`, `task` and `public` are used.
        by_client (`bool`, *optional*, defaults to `False`): Whether the examples of a test split are also assigned to
            clients. They are then partitioned in the same way as the training examples.

    Raises:
        RecipeError: If the dataset, a split or a column does not exist, or no examples or clients remain.
    """
    recipe = without_test_splits(recipe)
    data = recipe.data
    if recipe.partition is None:
        return _load_federated(recipe, by_client)
    loaded = load_splits(recipe)
    splits = {split: pooled(examples) for split, examples in {**loaded.splits, **load_server(recipe)}.items()}
    splits, incomplete = drop_incomplete(recipe, splits)
    splits, num_empty = _drop_empty(recipe, splits)
    task, splits = build_task(recipe, splits)
    public, server = load_public(recipe), take_server(recipe, splits)
    for split in splits:
        maximum = data.max_train_rows if split == data.train_split else data.max_test_rows
        splits[split] = sample_examples(splits[split], maximum, data.seed)
    # Validation splits and additional test splits are not partitioned.
    validation = None if data.validation_split is None else splits.pop(data.validation_split)
    further_tests = {split: splits.pop(split) for split in data.further_test_splits}
    if recipe.public is not None and recipe.public.share is not None:
        splits, public, server = _set_aside_public(splits, recipe, recipe.public, recipe.public.share)
    raw = _take_validation(_partition(recipe, recipe.partition, loaded, splits, task, by_client), recipe, validation)
    return dataclasses.replace(
        raw,
        num_empty=num_empty,
        incomplete=incomplete,
        note=loaded.note,
        public=public,
        server=server,
        further_tests=further_tests,
    )


def load_public(recipe: Recipe) -> Dataset | None:
    """Load the public examples of `public.path`, without their labels. `None` if the field is not set."""
    section = recipe.public
    if section is None or section.path is None:
        return None
    examples = pooled(load_examples(section.path, "public.path", PUBLIC_SPLITS, options=recipe.data.table_options)[0])
    labels = [name for name in (label_column(recipe.task),) if name in examples.column_names]
    return sample_examples(examples.remove_columns(labels), section.max_rows, recipe.data.seed)


def load_server(recipe: Recipe) -> dict[str, Dataset]:
    """Load the examples of `public.server_path` as a further split. [`take_server`] removes it again."""
    section = recipe.public
    if section is None or section.server_path is None:
        return {}
    options = recipe.data.table_options
    examples, _ = load_examples(section.server_path, "public.server_path", PUBLIC_SPLITS, options=options)
    return {SERVER_PATH: pooled(examples)}


def take_server(recipe: Recipe, splits: dict[str, Any]) -> Dataset | None:
    """Remove the server's examples from the splits, and return them."""
    if SERVER_PATH not in splits or recipe.public is None:
        return None
    return sample_examples(splits.pop(SERVER_PATH), recipe.public.max_server_rows, recipe.data.seed)


def _drop_empty(recipe: Recipe, splits: dict[str, Dataset]) -> tuple[dict[str, Dataset], int]:
    """Drop empty examples if requested, and count them."""
    before = sum(map(len, splits.values()))
    if recipe.data.drop_empty:
        task = task_without_label_names(recipe)
        with recipe_errors("task"):
            filtered = DatasetDict(splits).filter(
                lambda batch: [not empty for empty in task.find_empty(batch)], batched=True
            )
        splits = dict(filtered)
    for split, dataset in splits.items():
        if not len(dataset):
            raise RecipeError(f"data.path: no example remains of the split {split!r} of {recipe.data.path}.")
    return splits, before - sum(map(len, splits.values()))


def _set_aside_public(
    splits: dict[str, Dataset], recipe: Recipe, section: PublicSection, share: float
) -> tuple[dict[str, Dataset], Dataset, Dataset | None]:
    """Return the splits without the examples that are set aside, the public examples, and the server's examples."""
    data = recipe.data
    with recipe_errors("public"):
        parts = split_for_distillation(
            splits[data.train_split],
            share,
            section.server_share,
            label_column(recipe.task) or "label",
            section.stratify_by_column,
            data.seed,
        )
    public = sample_examples(parts.public, section.max_rows, data.seed)
    server = None if parts.server is None else sample_examples(parts.server, section.max_server_rows, data.seed)
    return {**splits, data.train_split: pooled(parts.private)}, public, server


def _partition(
    recipe: Recipe,
    section: ClassSection,
    loaded: RawSplits,
    splits: dict[str, Dataset],
    task: Task,
    by_client: bool,
) -> RawData:
    """Partition the training examples, and select the test examples."""
    data = recipe.data
    partitioner = build("partition", section.cls, section.arguments)
    if isinstance(partitioner, NaturalPartitioner):
        # The task may read the column of the clients. It removes the columns that it does not read.
        partitioner = dataclasses.replace(partitioner, keep_column=True)
    with recipe_errors("partition"):
        if loaded.test is None or not by_client:
            clients = FederatedDataset.from_dataset(splits[data.train_split], partitioner)
        else:
            federated = FederatedDatasetDict.from_dataset(splits, partitioner)
            train, by_id = _training_clients(federated[data.train_split], recipe, task), federated[loaded.test]
            test = by_id.to_dataset()
            num_without_client = len(splits[loaded.test]) - len(test)
            return RawData(train, test, by_id, task, loaded.source, num_without_client=num_without_client)
    if loaded.test is None:
        return _hold_out(clients, recipe, task)
    return RawData(_training_clients(clients, recipe, task), splits[loaded.test], None, task, loaded.source)


def _training_clients(clients: FederatedDataset, recipe: Recipe, task: Task) -> FederatedDataset:
    """
    The clients that train, if a split has the examples to evaluate on.

    With a validation split, the test examples can be held out of the training split. They are left out.
    """
    if recipe.data.test_clients or recipe.data.test_examples:
        return _hold_out_test(clients, recipe, task).train
    return limit_clients(clients, recipe.data)


def _take_validation(raw: RawData, recipe: Recipe, split: Dataset | None) -> RawData:
    """Add the validation split, or hold out validation examples, in a run that is evaluated on test examples."""
    data = recipe.data
    if data.evaluate_on == "validation" or data.validation_examples is None:
        return dataclasses.replace(raw, validation=split)
    train, held_out = hold_out_validation(raw.train, recipe)
    validation = limit_examples(held_out, data.max_test_rows, data.seed).to_dataset()
    return dataclasses.replace(raw, train=train, validation=validation)


def _hold_out(clients: FederatedDataset, recipe: Recipe, task: Task) -> RawData:
    """Hold out the examples to evaluate on: test or validation examples."""
    data = recipe.data
    if data.evaluate_on == "test":
        return _hold_out_test(clients, recipe, task)
    train, validation = hold_out_validation(_training_clients(clients, recipe, task), recipe)
    limited = limit_examples(validation, data.max_test_rows, data.seed)
    source = f", {100 * (data.validation_examples or 0):g} % of the training examples of each client"
    source += " (data.validation_examples)"
    if limited is not validation:
        source += f", limited by data.max_test_rows={data.max_test_rows}"
    return RawData(train, limited.to_dataset(), limited, task, source)


def _hold_out_test(clients: FederatedDataset, recipe: Recipe, task: Task) -> RawData:
    """Hold out test examples: whole clients, or a share of the examples of each client."""
    data = recipe.data
    if data.test_clients:
        train, test = hold_out_clients(clients, data)
        source = f" of {plural(len(test), 'held-out client')}"
    else:
        share = DEFAULT_TEST_EXAMPLES if data.test_examples is None else data.test_examples
        if share == 0:
            raise RecipeError(
                f"data.test_examples is 0, and {data.path} has no split test or validation with labels, so no examples"
                " remain to test on. Set data.test_path, data.test_split or data.test_clients, or set"
                " data.test_examples to a share such as 0.1."
            )
        column = label_column(recipe.task)
        clients = limit_clients(clients, data)
        with recipe_errors("data.test_examples"):
            train, test = hold_out_examples(
                clients, share, data.seed, column if column in clients.column_names else None
            )
        source = f", {100 * share:g} % of the examples of each client (data.test_examples)"
        if len(test) < len(train):
            source += f"; {len(train) - len(test)} clients with a single example keep it for training"
    limited = limit_examples(test, data.max_test_rows, data.seed)
    if limited is not test:
        source += f", limited by data.max_test_rows={data.max_test_rows}"
    return RawData(train, limited.to_dataset(), limited, task, source, holds_out_clients=bool(data.test_clients))


def build_task(recipe: Recipe, splits: dict[str, Any]) -> tuple[Task, dict[str, Any]]:
    """
    Build the task of a recipe. Label names that the recipe does not set are read from the data.

    Args:
        recipe ([`Recipe`]): The recipe.
        splits (`dict[str, Dataset or FederatedDataset]`): The raw examples, with the training split first.

    Returns:
        `tuple[Task, dict[str, Dataset or FederatedDataset]]`: The task and the examples. A label column without names
        is converted to `ClassLabel`.

    Raises:
        RecipeError: If a column does not exist, or the label names cannot be determined.
    """
    cls, given, unnamed = recipe.task.cls, recipe.task.given, recipe.task.missing_labels
    if unnamed == ["label_names"]:
        splits = encode_labels(splits, label_column(recipe.task) or "label")
    for examples in splits.values():
        _check_label_order(examples, recipe.task)
    first = next(iter(splits.values()))
    with recipe_errors("task"):
        task: Task = cls.from_dataset(pooled(first), **given) if unnamed else cls(**given)
    for split, examples in splits.items():
        for column in task.columns:
            check_column(examples, column, "" if examples is first else f" in the split {split!r}")
    return task, splits


def _check_label_order(dataset: Dataset | FederatedDataset, section: ClassSection) -> None:
    """Check that label names in the recipe and in the dataset refer to the same label ids."""
    names = label_names((dataset.features or {}).get(label_column(section))) or []
    for argument in ("label_names", "tag_names"):
        for number, name in enumerate(section.given.get(argument, ())):
            if name in names and names.index(name) != number:
                raise RecipeError(
                    f"task.{argument}: {name!r} is label {number} in the recipe and label {names.index(name)} in the"
                    f" data. Remove the field, or use the order of the data: {', '.join(names)}."
                )


def _load_federated(recipe: Recipe, by_client: bool) -> RawData:
    """Load a federated dataset from a folder or the Hub."""
    data = recipe.data
    for name in ("name", "drop_empty"):
        if getattr(data, name) not in (None, False):
            raise RecipeError(f"data.{name} is set without partition. Only recipes with a partition accept it.")
    loaded = load_federated_splits(recipe)
    splits, incomplete = drop_incomplete(recipe, {**loaded.splits, **load_server(recipe)})
    task, splits = build_task(recipe, splits)
    public, server = load_public(recipe), take_server(recipe, splits)
    clients = limit_examples(splits[data.train_split], data.max_train_rows, data.seed, keep_clients=True)
    if loaded.test is None:
        raw = _hold_out(clients, recipe, task)
    else:
        test = splits[loaded.test]
        if not isinstance(test, FederatedDataset) and by_client:
            raise RecipeError(
                f"federation.evaluate_clients is set, but data.test_path={data.test_path} does not assign its examples"
                " to clients. Set data.test_path to a federated dataset, or remove evaluate_clients."
            )
        test = sample_examples(test, data.max_test_rows, data.seed)
        by_id = test if isinstance(test, FederatedDataset) else None
        raw = RawData(_training_clients(clients, recipe, task), pooled(test), by_id, task, loaded.source)
    pooled_splits = {
        split: sample_examples(pooled(splits[split]), data.max_test_rows, data.seed)
        for split in [*filter(None, (data.validation_split,)), *data.further_test_splits]
    }
    raw = _take_validation(raw, recipe, pooled_splits.pop(data.validation_split or "", None))
    return dataclasses.replace(
        raw,
        incomplete=incomplete,
        note=loaded.note,
        public=public,
        server=server,
        further_tests=pooled_splits,
    )
