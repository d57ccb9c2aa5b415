"""Check the clients that `train` and `partition` use, and report errors and warnings in short lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from datasets import Dataset

from hf_federated.data import FederatedDataset
from hf_federated.data.checks import Finding, examine
from hf_federated.data.checks.report import short_lines
from hf_federated.data.checks.site_table import TEST, find_columns
from hf_federated.data.checks.sources import dataset_tables
from hf_federated.experiments.data.checked_data import TASK_COLUMNS, DataOptions, open_data, task_columns
from hf_federated.experiments.data.raw import RawData
from hf_federated.experiments.errors import CommandError
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
    findings = _findings(raw.train, raw.test, texts, label)
    if recipe.partition is not None and recipe.partition.name == "label-dirichlet":
        # The partitioner has logged this warning.
        findings = [finding for finding in findings if finding.kind != "no entities"]
    return short_lines(findings, f"hf-federated check {path}" if Path(path).exists() else "")


def partition_lines(
    clients: Mapping[str, FederatedDataset], options: DataOptions, label_column: str | None
) -> list[str]:
    """
    Check the data that `hf-federated partition` reads.

    Args:
        clients (`Mapping[str, FederatedDataset]`): The clients of each split, with the training split first.
        options ([`DataOptions`]): The data. Local files are read again, so that findings have files and lines.
        label_column (`str`, *optional*): The column of labels. Found by its name if not set.

    Returns:
        `list[str]`: A line for each kind of error or warning. Empty if nothing was found.
    """
    first, *others = clients.values()
    test = others[0] if others else None
    try:
        data = open_data(options)
    except CommandError:
        # A dataset on the Hub, or a folder with another structure than a file for each site.
        return short_lines(_findings(first, test, None, label_column), "")
    command = f"hf-federated check {options.path}"
    report = examine(data.tables, data.columns, leave_out=LABEL_SKEW if _is_simulated(first) else ())
    return short_lines(report.findings, command)


def _findings(
    train: FederatedDataset, test: Dataset | FederatedDataset | None, texts: Sequence[str] | None, label: str | None
) -> list[Finding]:
    tables = dataset_tables(train)
    if test is not None:
        tables += dataset_tables(test, TEST)
    columns = find_columns(tables, texts, label)
    return examine(tables, columns, leave_out=LABEL_SKEW if _is_simulated(train) else ()).findings


def _is_simulated(clients: FederatedDataset) -> bool:
    return (clients.partitioning or {}).get("partitioner") not in NATURAL
