"""`hf-federated init`: write a first recipe from five answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_federated.cli.csv_options import add_csv_options, table_options
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.recipe.fields import named_section_fields
from hf_federated.experiments.recipe.starter import (
    METHODS,
    MODELS,
    PLACES,
    StarterAnswers,
    guess_columns,
    guess_task,
    next_commands,
    starter_recipe,
)


if TYPE_CHECKING:
    from hf_federated.data.tables import TableOptions

# The largest number of labels that a recipe lists.
MAX_LABELS = 100


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """
    Add the arguments of the command to a parser.

    Args:
        parser (`argparse.ArgumentParser`): The parser of the command.
        argv (`Sequence[str]`, *optional*): The arguments that follow the command.
    """
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="recipe.yaml", help="the file to write")
    parser.add_argument("--data", help="a file, a folder, or a Hub id")
    parser.add_argument("--task", choices=list(named_section_fields()["task"]), help="default: found from the columns")
    parser.add_argument("--model", help="Hub id or folder of a model (default: a small model for the task)")
    parser.add_argument("--method", choices=list(METHODS), help="default: fedavg")
    parser.add_argument("--clients", choices=list(PLACES), help="where the clients are (default: found from the data)")
    parser.add_argument("--client-column", metavar="COLUMN", help="with --clients column: the column (default: site)")
    parser.add_argument("--num-clients", metavar="NUMBER", type=int, default=10, help="with --clients simulated")
    parser.add_argument(
        "--client-names", metavar="NAME", nargs="+", default=["north", "south"], help="with --clients machines"
    )
    add_csv_options(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the file RECIPE")
    parser.epilog = (
        "Questions are asked for missing options, if the command runs in a terminal. Example: hf-federated init --data"
        " sites --clients files"
    )


def init(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If the file exists, or the data is missing or cannot be read.
    """
    path = Path(arguments.recipe)
    if path.exists() and not arguments.overwrite:
        raise CommandError(f"{path} exists. Choose another file name, or add --overwrite to replace it.")
    if arguments.num_clients < 1:
        raise CommandError(f"--num-clients is {arguments.num_clients}; it must be at least 1.")
    answers = collect_answers(arguments, sys.stdin.isatty())
    commands = next_commands(answers, arguments.recipe)
    try:
        path.write_text(starter_recipe(answers, arguments.recipe), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}. Choose another file name.") from error
    print(f"Wrote {path}. Look at the task and its columns, then run:")
    for command in commands:
        print(f"  {command}")
    if answers.clients == "machines":
        print("Each client runs its command on its machine, with its own examples. Copy the certificates there first.")


def collect_answers(arguments: argparse.Namespace, asks: bool) -> StarterAnswers:
    """
    Ask the questions that no option answers.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].
        asks (`bool`): Whether to ask. Otherwise missing options have their defaults.

    Raises:
        CommandError: If the data is missing or cannot be read.
    """
    data = arguments.data or (_ask("Data: a file, a folder, or a Hub id", "", {}) if asks else "")
    if not data:
        raise CommandError("--data is missing. Give a file, a folder or a Hub id, such as --data examples.csv.")
    from hf_federated.experiments.data.files import check_local_path

    check_local_path(data, "--data: ")
    options = table_options(arguments)
    columns = data_columns(Path(data), options)
    task = _choose(
        arguments.task, asks, "Task", guess_task(columns), dict.fromkeys(named_section_fields()["task"], "")
    )
    model = _choose(arguments.model, asks, "Model: a Hub id or a folder", MODELS[task], {})
    method = _choose(arguments.method, asks, "Method", "fedavg", {name: m.purpose for name, m in METHODS.items()})
    clients = _choose(arguments.clients, asks, "Where are the clients?", guess_place(Path(data), columns), PLACES)
    column = arguments.client_column or _site_column(columns) or "site"
    if clients == "column":
        column = _choose(arguments.client_column, asks, "Column that names the client", column, {})
        if columns and column not in columns:
            raise CommandError(f"--client-column is {column!r}, but the columns of {data} are {', '.join(columns)}.")
    return StarterAnswers(
        data,
        task,
        model,
        method,
        clients,
        columns,
        _label_names(Path(data), task, columns, options) if clients == "machines" else [],
        column,
        arguments.num_clients,
        arguments.client_names,
        {name: value for name, value in asdict(options).items() if value},
    )


def data_columns(path: Path, options: TableOptions) -> list[str]:
    """The columns of a local file, or of the first file of a folder. Empty for a dataset on the Hub."""
    file = next(iter(_data_files(path)), None)
    if file is None:
        return []
    from hf_federated.data.tables import read_table

    with command_errors("--data"):
        return read_table(file, options).columns


def guess_place(path: Path, columns: Sequence[str]) -> str:
    """Where the clients probably are: a name of `PLACES`."""
    from hf_federated.data.checks.paths import split_name
    from hf_federated.data.site_files import data_files, site_name
    from hf_federated.data.storage.partition_file import PARTITION_FILE

    if (path / PARTITION_FILE).is_file():
        return "federated"
    if path.is_dir():
        files = data_files(path)
        if len({site_name(file) for file in files}) > 1 and not any(map(split_name, files)):
            return "files"
    return "column" if _site_column(columns) else "simulated"


def _site_column(columns: Sequence[str]) -> str | None:
    names = ("site", "client", "client_id", "hospital", "bank", "branch", "country", "region", "domain")
    return next((column for name in names for column in columns if column.lower() == name), None)


def _data_files(path: Path) -> list[Path]:
    """The data files of a folder and its subfolders, or the file itself. Empty for a dataset on the Hub."""
    from hf_federated.data.tables import data_suffix

    if not path.is_dir():
        return [path] if path.is_file() else []
    files = [path for path in sorted(path.rglob("*")) if path.is_file() and data_suffix(path) is not None]
    # `partition.json` describes a federated dataset.
    return [path for path in files if path.name != "partition.json" and not path.name.startswith((".", "~$"))]


def _label_names(path: Path, task: str, columns: Sequence[str], options: TableOptions) -> list[str]:
    """
    The labels in the data, because a server without examples needs them.

    Integers are the ids of labels, so they are named only if all ids from 0 on occur.
    """
    column = guess_columns(task, columns).get("label_column")
    files = _data_files(path)
    if column not in columns or task not in ("text-classification", "cloze-classification"):
        return []
    from hf_federated.data.tables import read_table

    found: set[Any] = set()
    with command_errors("--data"):
        for table in (read_table(file, options) for file in files):
            for _, batch in table.batches() if column in table.columns else ():
                found |= {value for value in batch.column(column).unique().to_pylist() if value is not None}
    if any(not isinstance(value, str) for value in found):
        return [str(number) for number in range(len(found))] if found == set(range(len(found))) else []
    return sorted(found) if len(found) <= MAX_LABELS else []


def _choose(given: str | None, asks: bool, question: str, default: str, choices: Mapping[str, str]) -> str:
    if given is not None or not asks:
        return given or default
    return _ask(question, default, choices)


def _ask(question: str, default: str, choices: Mapping[str, str]) -> str:
    """Ask until the answer is one of the choices. An empty answer is the default."""
    print(f"\n{question}")
    for name, purpose in choices.items():
        print(f"  {name:<24}  {purpose}".rstrip())
    while True:
        try:
            answer = input(f"[{default}] > " if default else "> ").strip() or default
        except EOFError:
            raise CommandError(
                "the input ended before all questions were answered. Give the answers as options."
            ) from None
        if not choices or answer in choices:
            return answer
        print(f"{answer!r} is not a choice. Type one of {', '.join(choices)}.")
