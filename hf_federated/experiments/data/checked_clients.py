"""Check the clients that `train` and `partition` use, and report errors and warnings in short lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_federated.data import FederatedDataset
from hf_federated.data.checks import examine
from hf_federated.data.checks.report import short_lines
from hf_federated.data.checks.site_table import TEST, find_columns
from hf_federated.data.checks.sources import dataset_tables
from hf_federated.experiments.data.checked_data import TASK_COLUMNS, DataOptions, open_data, task_columns
from hf_federated.experiments.data.raw import RawData
from hf_federated.experiments.recipe.recipe import Recipe


# Partitioners that give examples to their own clients. Other partitioners simulate clients with different labels.
NATURAL = ("NaturalPartitioner", "from_column", "client per file", None)
LABEL_SKEW = ("label of one site", "constant label")


def recipe_lines(recipe: Recipe, raw: RawData) -> list[str]:
    """
    Check the examples that a recipe trains and tests on.

    Args:
        recipe ([`Recipe`]): The recipe. Tasks whose examples have other parts than texts and labels are not checked.
        raw ([`RawData`]): The training clients and the test examples.

    Returns:
        `list[str]`: A line for each kind of error or warning. Empty if nothing was found.
    """
    if recipe.task.name not in TASK_COLUMNS:
        return []
    texts, label = task_columns({"name": recipe.task.name, **recipe.task.given})
    path = recipe.data.path
    return _lines(raw.train, raw.test, texts, label, f"hf-federated check {path}" if Path(path).exists() else "")


def partition_lines(
    clients: Mapping[str, FederatedDataset], options: DataOptions, label_column: str | None
) -> list[str]:
    """
    Check the data that `hf-federated partition` reads, and the clients that it writes.

    Args:
        clients (`Mapping[str, FederatedDataset]`): The clients of each split, with the training split first.
        options ([`DataOptions`]): The data. Local files are read again, so that findings have files and lines.
        label_column (`str`, *optional*): The column of labels. Found by its name if not set.

    Returns:
        `list[str]`: A line for each kind of error or warning. Empty if nothing was found.
    """
    first, *others = clients.values()
    test = others[0] if others else None
    if not Path(options.path).exists():
        return _lines(first, test, None, label_column, "")
    data = open_data(options)
    command = f"hf-federated check {options.path}"
    is_simulated = _is_simulated(first)
    report = examine(data.tables, data.columns, leave_out=LABEL_SKEW if is_simulated else ())
    without_entities = []
    if is_simulated:
        # The files have other sites than the clients.
        found = _findings(first, None, data.columns.texts, data.columns.label or "")
        without_entities = [finding for finding in found if finding.kind == "no entities"]
    return short_lines([*report.findings, *without_entities], command)


def _lines(train: FederatedDataset, test: Any, texts: Any, label: str | None, command: str) -> list[str]:
    return short_lines(_findings(train, test, texts, label), command)


def _findings(train: FederatedDataset, test: Dataset | FederatedDataset | None, texts: Any, label: str | None) -> list:
    tables = dataset_tables(train)
    if test is not None:
        tables += dataset_tables(test, TEST)
    columns = find_columns(tables, texts, label)
    return examine(tables, columns, leave_out=LABEL_SKEW if _is_simulated(train) else ()).findings


def _is_simulated(clients: FederatedDataset) -> bool:
    return (clients.partitioning or {}).get("partitioner") not in NATURAL
