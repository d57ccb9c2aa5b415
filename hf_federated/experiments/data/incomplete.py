"""Examples without a text, a label or a client: drop them, or report the file and the line of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset

from hf_federated.data import FederatedDataset
from hf_federated.data.checks.doctor import missing_values
from hf_federated.data.checks.missing_values import missing_labels
from hf_federated.data.checks.site_table import Batch, blank
from hf_federated.data.checks.sources import dataset_tables
from hf_federated.experiments.data.checked_data import DataOptions, open_data
from hf_federated.experiments.data.files import is_missing_path
from hf_federated.experiments.data.held_out import keep_rows, rows_of
from hf_federated.experiments.data.label_encoding import label_column
from hf_federated.experiments.data.splits import task_without_label_names
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import RecipeError, recipe_errors
from hf_federated.tasks import Task
from hf_federated.utils.errors import IncompleteRowError


# Number of places in an error.
MAX_PLACES = 3


def drop_incomplete(recipe: Recipe, splits: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """
    Drop the examples that the task cannot encode because a text, a label or the client is missing.

    Args:
        recipe ([`Recipe`]): The recipe. Without `data.drop_incomplete`, no example is dropped.
        splits (`dict[str, Dataset or FederatedDataset]`): The raw examples by split.

    Returns:
        `tuple[dict[str, Dataset or FederatedDataset], dict[str, int]]`: The splits, and the number of dropped examples
        by client, or by split if the client of an example is not known.

    Raises:
        RecipeError: If no example of a split remains.
    """
    dropped: Counter[str] = Counter()
    if not recipe.data.drop_incomplete:
        return splits, dropped
    task, kept = task_without_label_names(recipe), {}
    column = _site_column(recipe)
    for split, examples in splits.items():
        is_federated = isinstance(examples, FederatedDataset)
        source, indices = rows_of(examples) if is_federated else (examples, None)
        with recipe_errors("task"):
            mask = incomplete_mask(source, task, label_column(recipe.task), column)
        if indices is not None:
            mask = mask[indices]
            owners = np.repeat(np.arange(len(examples)), list(examples.num_rows.values()))
            names = [str(name) for name in examples]
        else:
            owners, names = np.zeros(len(mask), dtype=np.int64), [split]
            if column is not None and column in source.column_names:
                sites = source.select_columns(column).select(np.flatnonzero(mask))[column]
                dropped.update("no client" if site is None else str(site) for site in sites)
                names = []
        for owner in np.unique(owners[mask]).tolist() if names else []:
            dropped[names[owner]] += int(mask[owners == owner].sum())
        if mask.all():
            raise RecipeError(
                f"data.drop_incomplete: no example of the split {split!r} of {recipe.data.path} remains."
            )
        if not mask.any():
            kept[split] = examples
        elif indices is not None:
            kept[split] = keep_rows(examples, source, indices, ~mask)
        else:
            kept[split] = examples.select(np.flatnonzero(~mask))
    return kept, dict(dropped)


def incomplete_mask(dataset: Dataset, task: Task, label: str | None = None, site: str | None = None) -> np.ndarray:
    """
    Whether each example has no text, no label or no client.

    Args:
        dataset (`datasets.Dataset`): The raw examples.
        task ([`Task`]): The task.
        label (`str`, *optional*): The column of the labels.
        site (`str`, *optional*): The column of the clients.
    """
    parts = [np.zeros(0, dtype=bool)]
    (table,) = dataset_tables(dataset)
    for lines, rows in table.batches():
        batch = Batch(table, np.zeros(len(lines), dtype=np.int64), lines, rows)
        columns = {name: rows.column(name).to_pylist() for name in task.columns if name in rows.schema.names}
        mask = np.array(task.find_empty(columns), dtype=bool)
        labels, sites = batch.column(label), batch.column(site)
        if labels is not None:
            mask |= missing_labels(labels, label in table.label_names)
        parts.append(mask if sites is None else mask | blank(sites))
    return np.concatenate(parts)


@contextmanager
def incomplete_errors(recipe: Recipe, examples: str | None = None) -> Iterator[None]:
    """
    Add the site, the file and the line to an error about an incomplete example, and how to drop such examples.

    Args:
        recipe ([`Recipe`]): The recipe.
        examples (`str`, *optional*): File or folder with the examples of one client, in place of `data.path`.

    Raises:
        RecipeError: In place of the error of a task or partitioner, which knows the number of the row only.
    """
    try:
        yield
    except ValueError as error:
        if not _is_incomplete(error):
            raise
        places = _places(recipe, examples)
        text = f"{'; '.join(places)}." if places else str(error)
        raise RecipeError(f"data: {text} Complete the rows, or drop them with data.drop_incomplete: true.") from error


def _places(recipe: Recipe, examples: str | None) -> list[str]:
    """The first places of incomplete examples in the files of a recipe. Empty if the data are not in local files."""
    data, task = recipe.data, task_without_label_names(recipe)
    if examples is not None:
        data = replace(data, path=examples, test_path=None)
    label = label_column(recipe.task)
    site = _site_column(recipe) if examples is None else None
    texts = [name for name in task.columns if name != label]
    if is_missing_path(data.path):
        return []
    try:
        checked = open_data(
            DataOptions(data.path, texts, label or "", site, data.test_path, table_options=data.table_options)
        )
    except CommandError:
        return []
    findings = missing_values(checked.tables, checked.columns)
    places = []
    for finding in findings[:MAX_PLACES]:
        of_site = f" (site {finding.site!r})" if finding.site else ""
        places.append(f"{finding.place}{of_site}: {finding.message.rstrip('.')}")
    return [*places, *([f"and {len(findings) - MAX_PLACES} more"] if len(findings) > MAX_PLACES else [])]


def _is_incomplete(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, IncompleteRowError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _site_column(recipe: Recipe) -> str | None:
    """The column that names the clients, or `None` if a partitioner or files define the clients."""
    section = recipe.partition
    return section.arguments.get("column") if section is not None and section.name == "natural" else None
