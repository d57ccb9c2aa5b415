"""Open the data that `hf-federated check` reads: a path or a recipe. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_federated.data.checks.cut_texts import model_limit
from hf_federated.data.checks.doctor import Limit
from hf_federated.data.checks.paths import path_tables
from hf_federated.data.checks.site_table import TEST, Columns, SiteTable, find_columns
from hf_federated.data.tables import TableOptions
from hf_federated.experiments.data.files import check_local_path, suggest_path
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.recipe.yaml_file import DEFAULT_TASK, read_values


# The fields of a task with the columns of its texts, with their defaults, and the field with the column of its labels.
# Other tasks have other columns, which are not checked.
TASK_COLUMNS: dict[str, tuple[dict[str, str], str]] = {
    "text-classification": ({"text_column": "text"}, "label_column"),
    "sequence-tagging": ({"tokens_column": "tokens"}, "tags_column"),
    "language-modeling": ({"text_column": "text"}, ""),
    "question-answering": ({"question_column": "question", "context_column": "context"}, ""),
}
LABEL_DEFAULTS = {"label_column": "label", "tags_column": "ner_tags"}


@dataclass(frozen=True)
class CheckedData:
    """
    The data to check.

    Args:
        tables (`list[SiteTable]`): The tables, with the training tables first.
        columns ([`Columns`]): The columns to read.
        limit ([`Limit`], *optional*): The number of tokens that the model reads.
    """

    tables: list[SiteTable]
    columns: Columns
    limit: Limit | None = None


@dataclass
class DataOptions:
    """
    What is known about the data, from the command line or a recipe.

    Args:
        path (`str`): A folder, a file or a federated dataset.
        texts (`list[str]`, *optional*): The columns of texts. Found by their names if not set.
        label (`str`, *optional*): The column of labels.
        site (`str`, *optional*): The column of sites.
        test (`str`, *optional*): A file or folder with the test examples.
        model (`str`, *optional*): The model, of which the tokenizer is loaded.
        max_length (`int`, *optional*): Number of tokens that training keeps.
        table_options ([`TableOptions`], *optional*): What is known about CSV files.
    """

    path: str
    texts: list[str] | None = None
    label: str | None = None
    site: str | None = None
    test: str | None = None
    model: str | None = None
    max_length: int | None = None
    table_options: TableOptions | None = None


def open_checked_data(arguments: Any, table_options: TableOptions) -> CheckedData:
    """
    Open the tables that the arguments of `hf-federated check` name.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments. If `data` is a recipe, they take precedence over it.
        table_options ([`TableOptions`]): What is known about CSV files.

    Raises:
        CommandError: If a path does not exist, has no data, or has no column of the given name.
    """
    is_recipe = Path(arguments.data).suffix.lower() in (".yaml", ".yml")
    options = _recipe_options(arguments.data) if is_recipe else DataOptions(arguments.data)
    options.texts = arguments.text_column or options.texts
    options.label = arguments.label_column or options.label
    options.site = arguments.site_column or options.site
    options.test = arguments.test or options.test
    options.model = arguments.model or options.model
    options.max_length = arguments.max_length or options.max_length
    given = {name: value for name, value in vars(table_options).items() if value not in (None, [])}
    with command_errors(arguments.data):
        options.table_options = replace(options.table_options or TableOptions(), **given)
    return open_data(options)


def open_data(options: DataOptions) -> CheckedData:
    """Open the tables of a path. Errors as in [`open_checked_data`]."""
    check_local_path(options.path)
    if not Path(options.path).exists():
        raise CommandError(
            f"{options.path} does not exist{suggest_path(options.path)}. `hf-federated check` reads local files."
        )
    with command_errors(options.path):
        tables = path_tables(Path(options.path), options.site, options.table_options)
    if options.test is not None:
        check_local_path(options.test, "--test: ")
        with command_errors(options.test):
            tables += path_tables(Path(options.test), options.site, options.table_options, TEST)
    with command_errors(options.path):
        columns = find_columns(tables, options.texts, options.label, options.site)
    return CheckedData(tables, columns, None if options.model is None else _limit(options.model, options.max_length))


def _recipe_options(path: str) -> DataOptions:
    """The options that a recipe contains. Its model is not loaded."""
    values = read_values(path)
    data, task, partition = (_section(values, name) for name in ("data", "task", "partition"))
    if not isinstance(data.get("path"), str):
        raise CommandError(f"{path}: the recipe has no data.path. Set it to the data, or check the files directly.")
    texts, label = task_columns(task)
    is_natural = partition.get("name") == "natural"
    return DataOptions(
        data["path"],
        texts,
        label,
        partition.get("column") if is_natural else None,
        data.get("test_path"),
        max_length=task.get("max_length"),
        table_options=_table_options(path, data),
    )


def _table_options(path: str, data: Mapping[str, Any]) -> TableOptions:
    with command_errors(f"{path}: data.csv"):
        return TableOptions(**(data.get("csv") or {}))


def task_columns(task: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The columns of texts, and the column of labels, that the section `task` names. Empty without labels."""
    texts, label = TASK_COLUMNS.get(task.get("name") or DEFAULT_TASK, ({}, ""))
    found: list[str] = []
    for name, default in texts.items():
        value = task.get(name) or default
        found += [value] if isinstance(value, str) else list(value)
    return found, task.get(label) or LABEL_DEFAULTS[label] if label else ""


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _limit(model: str, max_length: int | None) -> Limit:
    """Load the tokenizer of a model and the number of tokens that it reads."""
    from transformers import AutoTokenizer

    check_local_path(model, "--model: ")
    with command_errors(f"--model {model}"):
        tokenizer = AutoTokenizer.from_pretrained(model)
        config = Path(model) / "config.json"
        values = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    length = max_length or model_limit(tokenizer, values)
    if length is None:
        raise CommandError(f"--model {model}: the model does not name its largest number of tokens. Set --max-length.")
    return Limit(tokenizer, length)
