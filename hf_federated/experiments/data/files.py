"""Load local data files, and one file for each client."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset
from datasets.exceptions import DatasetsError
from transformers.utils import logging

from hf_federated.data.site_files import (
    SPLIT_NAMES,
    data_files,
    noted_files,
    same_site_error,
    separator_mistake,
    site_files,
    site_name,
)
from hf_federated.data.tables import (
    TABLE_SUFFIXES,
    TableError,
    TableOptions,
    data_suffix,
    find_encoding,
    load_tables,
    read_table,
    table_notes,
)
from hf_federated.experiments.errors import CommandError, command_errors


logger = logging.get_logger(__name__)


def load_file(path: Path, split: str, options: TableOptions | None = None) -> DatasetDict:
    """
    Load one file as one split. A line of the log states the format, unless it is UTF-8 with commas.

    Args:
        path (`Path`): The data file.
        split (`str`): Name of the split.
        options ([`TableOptions`], *optional*): What is known about CSV files.

    Raises:
        CommandError: If the format of the file is unknown, or the file cannot be read.
    """
    loaded, notes = read_file(path, split, options)
    log_notes([(path.name, notes)])
    return loaded


def read_file(path: Path, split: str, options: TableOptions | None = None) -> tuple[DatasetDict, list[str]]:
    """Load one file as one split, and return sentences about what is unusual in the file."""
    try:
        if _is_read_by_datasets(path, options):
            return _load_without_options(path, split), []
        table = read_table(path, options)
        if mistake := separator_mistake(table, options):
            raise CommandError(mistake)
        notes = table_notes(table)
        return DatasetDict(load_tables({split: [path]}, options)), notes
    except TableError as error:
        raise CommandError(str(error)) from error


def _is_read_by_datasets(path: Path, options: TableOptions | None) -> bool:
    """Whether `datasets` reads a file as it is: Parquet, and JSON and text in UTF-8."""
    suffix = data_suffix(path)
    if suffix in (".json", ".jsonl", ".txt"):
        encodings = ("utf-8",) if suffix == ".txt" else ("utf-8", "utf-8-sig")
        return find_encoding(path, None if options is None else options.encoding) in encodings
    return suffix == ".parquet"


def _load_without_options(path: Path, split: str) -> DatasetDict:
    reader = TABLE_SUFFIXES[data_suffix(path) or ""]
    try:
        return load_dataset(reader, data_files={split: glob.escape(str(path))})
    except DatasetsError as error:
        # `datasets` does not name the line.
        for _ in read_table(path).batches():
            pass
        raise CommandError(f"{path} cannot be read: {' '.join(str(error.__cause__ or error).split())}") from error


def log_notes(notes: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Log the notes on files, as [`noted_files`] returns them."""
    for line in noted_files(notes):
        logger.warning(line)


def is_missing_path(data: str) -> bool:
    """Whether `data` is written like a local path, not like a Hub id, and does not exist."""
    named_file = data_suffix(Path(data)) is not None or data.startswith((".", "/", "~")) or data.count("/") > 1
    return named_file and not Path(data).exists()


def check_local_path(name: str, prefix: str = "") -> None:
    """Raise [`CommandError`] with `prefix` if `name` is written like a local path, and the path does not exist."""
    if is_missing_path(name):
        raise CommandError(f"{prefix}the file or folder {name} does not exist{suggest_path(name)}.")


def suggest_path(name: str) -> str:
    """A hint such as `" (did you mean outputs/minilm?)"` if a file or folder has a similar name, otherwise `""`."""
    folder = Path(name).parent
    siblings = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    similar = difflib.get_close_matches(Path(name).name, siblings, n=1)
    return f" (did you mean {(folder / similar[0]).as_posix()}?)" if similar else ""


@contextmanager
def hub_errors(field: str, name: str) -> Iterator[None]:
    """
    Raise an error if no local file or folder has the name: before the block if the name is written like a local path,
    and otherwise at an error of the Hub, because the name can be a misspelt path.

    Args:
        field (`str`): The field or option with the name.
        name (`str`): A path or Hub id.

    Raises:
        CommandError: If the name is no local path, and is written like one or the Hub raises an error.
    """
    check_local_path(name, f"{field}: ")
    try:
        yield
    except OSError as error:
        # A plain FileNotFoundError is an error about the content of a repository, which exists.
        if Path(name).exists() or type(error) is FileNotFoundError:
            raise
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise CommandError(
            f"{field}: there is no file or folder {name}{suggest_path(name)}. It was not loaded from the Hub either:"
            f" {reason}."
        ) from error


def load_client_files(folder: Path, options: TableOptions | None = None) -> dict[str, Dataset]:
    """
    Load each file of a folder as the dataset of one client.

    Args:
        folder (`Path`): The folder. Hidden files and files in subfolders are not read.
        options ([`TableOptions`], *optional*): What is known about CSV files.

    Returns:
        `dict[str, datasets.Dataset]`: Client id, which is the name of the file without its suffix, to dataset. A
        column without values, and a column of integers with a missing value, have the type of the other files.

    Raises:
        CommandError: If the path is not a folder, if it has no data files, if two files have the same name without
            suffix, or if a file has the name of a split.
    """
    if not folder.is_dir():
        raise CommandError(f"{folder} is not a folder. Give a folder with one file for each client.")
    clients, repeated = site_files(data_files(folder))
    for path in repeated:
        raise CommandError(same_site_error(clients[site_name(path)], path))
    for client_id, path in clients.items():
        if client_id.lower() in SPLIT_NAMES:
            raise CommandError(
                f"{path} would become the client {client_id}. If it has test examples, move it to another folder and"
                " set data.test_path in the recipe. If it has the examples of a client, rename it."
            )
    if not clients:
        raise CommandError(
            f"{folder} has no data files. Allowed formats are {', '.join(TABLE_SUFFIXES)}. Files in subfolders are"
            " not read."
        )
    loaded, notes = {}, {}
    for client_id, path in clients.items():
        with command_errors(str(path)):
            splits, notes[path.name] = read_file(path, "train", options)
            loaded[client_id] = splits["train"]
    log_notes(notes.items())
    return _with_same_types(loaded)


def _with_same_types(clients: dict[str, Dataset]) -> dict[str, Dataset]:
    """
    Give a column the same type in all files, if only the guess of the reader differs.

    CSV and JSON files have no types. The reader guesses a type from the values of one file: a column without values
    becomes a column of floats, as does a column of integers with a missing value. Numbers do not become texts, because
    the numbers `007` and `7` are equal and the texts are not.
    """
    for column in next(iter(clients.values())).column_names:
        features = {client_id: rows.features.get(column) for client_id, rows in clients.items()}
        if len(set(map(repr, features.values()))) == 1 or not all(isinstance(f, Value) for f in features.values()):
            continue
        values = {client_id: rows.data.column(column) for client_id, rows in clients.items()}
        filled = [client_id for client_id in clients if values[client_id].null_count < len(values[client_id])]
        dtypes = dict.fromkeys(features[client_id].dtype for client_id in filled)
        if set(dtypes) == {"int64", "float64"}:
            is_integer = all(_are_integers(values[i]) for i in filled if features[i].dtype == "float64")
            dtypes = {"int64" if is_integer else "float64": None}
        if len(dtypes) == 1 or set(dtypes) == {"string", "large_string"}:
            feature = Value(next(iter(dtypes)))
            clients = {client_id: rows.cast_column(column, feature) for client_id, rows in clients.items()}
    return clients


def _are_integers(values: pa.ChunkedArray) -> bool:
    return pc.all(pc.equal(pc.floor(values), values)).as_py()


def label_names(feature: Any) -> list[str] | None:
    """The label names of a column of labels, or of lists of labels. `None` if the feature has no label names."""
    feature = getattr(feature, "feature", feature)
    return feature.names if isinstance(feature, ClassLabel) else None
