"""Load the splits that the section `data` of a recipe names, and find the split with the test examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Value

from hf_federated.data import FederatedDataset, FederatedDatasetDict
from hf_federated.data.storage.partition_file import PARTITION_FILE
from hf_federated.data.tables import TableOptions
from hf_federated.experiments.data.files import hub_errors, load_file
from hf_federated.experiments.data.folders import load_named_splits, split_names
from hf_federated.experiments.data.label_encoding import distinct_values, label_column
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import RecipeError, build, recipe_errors
from hf_federated.experiments.recipe.sections import DataSection
from hf_federated.tasks import Task


# Splits that are used for testing if a recipe does not set its test examples. The first one that exists is used.
TEST_SPLITS = ("test", "validation")
# The key of the examples of `data.test_path`.
TEST_PATH = "test_path"


@dataclass(frozen=True)
class RawSplits:
    """
    The raw examples of a recipe by split.

    Args:
        splits (`dict[str, Dataset or FederatedDataset]`): The examples by split, with the training split first.
        test (`str`, *optional*): The key of the test examples in `splits`. `None` if test examples are held out from
            the training split.
        source (`str`): Where the test examples are from, such as `" of the split 'test'"`.
        note (`str`): A sentence about a test split that the run does not use.
    """

    splits: dict[str, Any]
    test: str | None = None
    source: str = ""
    note: str = ""


def load_splits(recipe: Recipe) -> RawSplits:
    """
    Load the splits of a dataset that is not partitioned yet.

    Raises:
        RecipeError: If the dataset or a split does not exist or cannot be read.
    """
    data, path = recipe.data, Path(recipe.data.path)
    names = _named_splits(data)
    with recipe_errors("data.path"), hub_errors("data.path", data.path):
        if (path / PARTITION_FILE).is_file():
            raise RecipeError(f"partition: {data.path} is already partitioned. Remove the section.")
        if path.is_file():
            if len(names) > 1:
                raise RecipeError(
                    f"data: {data.path} is a file with one split, so the split {names[1]!r} does not exist. Use a"
                    " folder, or set data.test_path to the file with the test examples."
                )
            loaded: dict[str, Any] = dict(load_file(path, data.train_split, data.table_options))
            candidates, note = [], _note_on_neighbor(data, path)
        else:
            loaded = load_named_splits(data.path, names, data.name, data.revision, data.table_options)
            # A folder is always searched, for the note on a test split that is not used.
            look = data.finds_test_split or path.is_dir()
            candidates = _candidates(data, split_names(data.path, data.name, data.revision) if look else [])
            note = ""

        def load(split: str) -> Dataset:
            return load_named_splits(data.path, [split], data.name, data.revision, data.table_options)[split]

        return _choose_test(recipe, loaded, candidates, load, note)


def load_federated_splits(recipe: Recipe) -> RawSplits:
    """
    Load the splits of a federated dataset from a folder or the Hub.

    Raises:
        RecipeError: If the dataset or a split does not exist, or the dataset is not partitioned.
    """
    data, path = recipe.data, Path(recipe.data.path)
    with recipe_errors("data.path"), hub_errors("data.path", data.path):
        try:
            if path.exists():
                splits = FederatedDatasetDict.load_from_disk(data.path)
            else:
                splits = FederatedDatasetDict.from_hub(data.path, revision=data.revision)
        except FileNotFoundError as error:
            if type(error) is not FileNotFoundError:  # an error of the Hub
                raise
            raise RecipeError(
                f"partition is missing, and {data.path} is not a federated dataset. Set partition, or run"
                " `hf-federated partition` first (with --client-per-file if each file is a client)."
            ) from error
    names = _named_splits(data)
    for split in names:
        if split not in splits:
            raise RecipeError(f"data: {data.path} has no split {split!r}. Its splits are {', '.join(splits)}.")
    return _choose_test(
        recipe, {split: splits[split] for split in names}, _candidates(data, splits), splits.__getitem__
    )


def _named_splits(data: DataSection) -> list[str]:
    test_split = None if data.test_path is not None else data.test_split
    return [data.train_split, *filter(None, (test_split, data.validation_split)), *data.further_test_splits]


def _candidates(data: DataSection, names: Iterable[str]) -> list[str]:
    """The test splits that the data contains and the recipe does not name."""
    used = _named_splits(data)
    used[0] = used[0].partition("[")[0]  # `train[:10%]` is a part of the split `train`
    return [split for split in TEST_SPLITS if split in set(names) and split not in used]


def _choose_test(
    recipe: Recipe, loaded: dict[str, Any], candidates: Sequence[str], load: Callable[[str], Any], note: str = ""
) -> RawSplits:
    """
    Choose the test examples: those that the recipe names, or else the first test split that can be used.

    Args:
        recipe ([`Recipe`]): The recipe.
        loaded (`dict`): The splits that the recipe names.
        candidates (`Sequence[str]`): The test splits that the data contains and the recipe does not name.
        load (`Callable`): Loads a candidate.
        note (`str`, *optional*, defaults to `""`): The note for the case that there is no candidate.
    """
    data = recipe.data
    if data.test_path is not None:
        test, source = load_test_path(data.test_path, data.test_split, data.table_options)
        return RawSplits({**loaded, TEST_PATH: test}, TEST_PATH, source)
    if data.test_split is not None:
        return RawSplits(loaded, data.test_split, f" of the split {data.test_split!r}")
    if not data.finds_test_split:
        if candidates:
            note = f"The split {candidates[0]!r} of {data.path} is not used."
        return RawSplits(loaded, note=note)
    for split in candidates:
        examples = load(split)
        missing = _missing(recipe, examples)
        if missing is None:
            return RawSplits({**loaded, split: examples}, split, f" of the split {split!r}, found in {data.path}")
        note = f"The split {split!r} of {data.path} is not used, because it has no {missing}."
    return RawSplits(loaded, note=note)


def _missing(recipe: Recipe, examples: Dataset | FederatedDataset) -> str | None:
    """What a test split lacks: a column, or all labels, as in a competition. `None` if the split can be used."""
    for column in task_without_label_names(recipe).columns:
        if column not in examples.column_names:
            return f"column {column!r}"
    labels = label_column(recipe.task)
    if labels is None or not isinstance((examples.features or {}).get(labels), (ClassLabel, Value)):
        return None
    # A `ClassLabel` uses -1 for a missing label.
    return None if distinct_values(examples, labels) - {-1} else f"labels in the column {labels!r}"


def load_test_path(
    path: str, split: str | None, options: TableOptions | None = None
) -> tuple[Dataset | FederatedDataset, str]:
    """
    Load the examples of `data.test_path`.

    Args:
        path (`str`): `data.test_path`.
        split (`str`, *optional*): `data.test_split`. Defaults to the only split, or else `test` or `validation`.
        options ([`TableOptions`], *optional*): What is known about CSV files.

    Returns:
        `tuple[Dataset or FederatedDataset, str]`: The examples, and their description.

    Raises:
        RecipeError: If the path or the split does not exist or cannot be read.
    """
    candidates = (split,) if split is not None else TEST_SPLITS
    examples, found = load_examples(path, "data.test_path", candidates, split is not None, options)
    return examples, f" of {path}" if found is None else f" of the split {found!r} of {path}"


def load_examples(
    name: str,
    field: str,
    candidates: Sequence[str],
    is_given: bool = False,
    options: TableOptions | None = None,
) -> tuple[Dataset | FederatedDataset, str | None]:
    """
    Load one split of a file, a folder or a dataset on the Hub.

    Args:
        name (`str`): The file, the folder or the Hub id.
        field (`str`): The field of the recipe that contains `name`, for error messages.
        candidates (`Sequence[str]`): Names of the split, of which the first one that exists is loaded. A single split
            is loaded under any name.
        is_given (`bool`, *optional*, defaults to `False`): Whether the recipe names the split with `data.test_split`.
        options ([`TableOptions`], *optional*): What is known about CSV files.

    Returns:
        `tuple[Dataset or FederatedDataset, str or None]`: The examples, and the name of the split if there are
        several splits.

    Raises:
        RecipeError: If the path or the split does not exist or cannot be read.
    """
    path = Path(name)
    with recipe_errors(field), hub_errors(field, name):
        if path.is_file():
            if is_given:
                raise RecipeError(f"data: {name} is a file with one split. Remove data.test_split.")
            return load_file(path, "test", options)["test"], None
        federated = FederatedDatasetDict.load_from_disk(path) if (path / PARTITION_FILE).is_file() else None
        names = list(split_names(name) if federated is None else federated)
        is_single = len(names) == 1 and not is_given
        split = names[0] if is_single else next((item for item in candidates if item in names), None)
        if split is None:
            wanted = f"there is no split {candidates[0]!r}" if is_given else "the split to use is unknown"
            advice = " Set data.test_split to one of them." if field.startswith("data.") else ""
            raise RecipeError(f"{field}: {wanted}. The splits of {name} are {', '.join(names)}.{advice}")
        loaded = load_named_splits(name, [split], options=options) if federated is None else federated
        examples = loaded[split]
    return examples, split if len(names) > 1 else None


def task_without_label_names(recipe: Recipe) -> Task:
    """Build the task with placeholders for unknown label names."""
    return build("task", recipe.task.cls, {**dict.fromkeys(recipe.task.missing_labels, ["0"]), **recipe.task.given})


def _note_on_neighbor(data: DataSection, path: Path) -> str:
    """A note if the file with the test examples is probably next to a single training file."""
    for split in TEST_SPLITS:
        neighbor = path.with_name(f"{split}{''.join(path.suffixes)}")
        if path.name.startswith("train.") and neighbor.is_file() and data.test_path is None:
            return f"{neighbor} is not used. To test on it, set data.test_path."
    return ""
