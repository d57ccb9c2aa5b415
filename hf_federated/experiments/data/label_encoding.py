"""Encode the labels of raw examples: string and integer columns become a `ClassLabel` with sorted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from datasets import ClassLabel, Dataset

from hf_federated.data import FederatedDataset
from hf_federated.experiments.recipe.recipe import ClassSection
from hf_federated.experiments.recipe.schema import RecipeError, recipe_errors


# All splits of a recipe have the same type.
Examples = TypeVar("Examples", bound=Dataset | FederatedDataset)


def label_column(task: ClassSection) -> str | None:
    """The column with the labels or tags of a task, or `None` if the task has no such column."""
    for argument in ("label_column", "tags_column"):
        default = getattr(task.cls, argument, None)
        if default is not None:
            return task.arguments.get(argument) or default
    return None


def check_column(examples: Dataset | FederatedDataset, column: str, of_split: str = "") -> None:
    """Raise a [`RecipeError`] if the examples have no such column. `of_split` names their split."""
    if column not in examples.column_names:
        raise RecipeError(
            f"task: the column {column!r} does not exist{of_split}. The columns are"
            f" {', '.join(examples.column_names)}."
        )


def encode_labels(splits: Mapping[str, Examples], column: str) -> dict[str, Examples]:
    """
    Convert a column of all splits to a `ClassLabel` with the same names.

    If a split has a `ClassLabel`, its names are used, and string labels of other splits are looked up in these names.
    Otherwise, the names are the values that occur in any split, sorted. The names therefore do not depend on the order
    of the examples or the clients.

    Args:
        splits (`Mapping[str, Dataset or FederatedDataset]`): The examples by split.
        column (`str`): The column with the labels: a `ClassLabel`, strings or integers. Missing labels stay missing.

    Returns:
        `dict`: The splits. A split whose column is a `ClassLabel` already is returned unchanged.

    Raises:
        RecipeError: If a split has no such column, the values cannot be labels, or the labels of two splits cannot be
            matched.
    """
    features = {}
    for split, examples in splits.items():
        check_column(examples, column, f" in the split {split!r}")
        features[split] = (examples.features or {})[column]
    with recipe_errors(f"task: labels of the column {column!r}"):
        return _encode(splits, column, features)


def _encode(splits: Mapping[str, Examples], column: str, features: Mapping[str, Any]) -> dict[str, Examples]:
    named = {split: feature.names for split, feature in features.items() if isinstance(feature, ClassLabel)}
    values = {split: distinct_values(examples, column) for split, examples in splits.items() if split not in named}
    found = set().union(*values.values())
    if not all(isinstance(value, (str, int)) or value.is_integer() for value in found):
        raise RecipeError(f"task: the column {column!r} has values that are not integers, which cannot be labels.")
    of_text = {split: any(isinstance(value, str) for value in distinct) for split, distinct in values.items()}
    of_text |= dict.fromkeys(named, True)
    first = next(iter(splits))
    for split in splits:
        if of_text[split] != of_text[first] and values.get(split) != set():
            raise RecipeError(
                f"task: the labels in the column {column!r} are {_kind(of_text[first])} in the split {first!r} and"
                f" {_kind(of_text[split])} in the split {split!r}. Write them in the same way."
            )
    if not named:
        ordered = sorted(found)
        names = [str(value) for value in ordered]
        number_of = {value: number for number, value in enumerate(ordered)}
    else:
        owner, names = next(iter(named.items()))
        number_of = {name: number for number, name in enumerate(names)}
        for split, other in named.items():
            if other != names:
                raise RecipeError(
                    f"task: the splits {owner!r} and {split!r} differ in the label names of the column {column!r}:"
                    f" {', '.join(names)} and {', '.join(other)}. Write both with the same names in the same order."
                )
        if unknown := sorted(found - set(names)):
            raise RecipeError(
                f"task: the label {unknown[0]!r} in the column {column!r} is not a label of the split {owner!r}, whose"
                f" labels are {', '.join(names)}."
            )
    encoded = dict(splits)
    for split, distinct in values.items():
        encoded[split] = _as_class_labels(splits[split], column, names, {v: number_of[v] for v in distinct})
    return encoded


def pooled(examples: Dataset | FederatedDataset) -> Dataset:
    """The examples of all clients in one dataset. A dataset without clients is returned unchanged."""
    return examples.to_dataset() if isinstance(examples, FederatedDataset) else examples


def distinct_values(examples: Dataset | FederatedDataset, column: str) -> set[Any]:
    """The values that occur in a column, without missing values."""
    return set(pooled(examples).select_columns(column).unique(column)) - {None}


def _as_class_labels(examples: Any, column: str, names: list[str], number_of: Mapping[Any, int]) -> Any:
    if any(value != number for value, number in number_of.items() if not isinstance(value, str)):
        examples = examples.map(
            lambda values: {column: [None if value is None else number_of[value] for value in values]},
            input_columns=column,
            batched=True,
        )
    return examples.cast_column(column, ClassLabel(names=names))


def _kind(is_text: bool) -> str:
    return "names" if is_text else "numbers"
