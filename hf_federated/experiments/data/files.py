"""Load local data files and check local data folders."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset
from datasets.exceptions import DatasetsError

from hf_federated.experiments.errors import CommandError, command_errors


READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}
# A file with such a name has the examples of a split, and not of a client.
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")


def data_suffix(path: Path) -> str | None:
    """The suffix that defines the data format, such as `.jsonl` in `rows.jsonl.gz`, or `None` if there is none."""
    return next((suffix.lower() for suffix in reversed(path.suffixes) if suffix.lower() in READERS), None)


def load_file(path: Path, split: str) -> DatasetDict:
    """
    Load one file as one split.

    Args:
        path (`Path`): The data file.
        split (`str`): Name of the split.

    Raises:
        CommandError: If the format of the file is unknown, or the file cannot be read.
    """
    suffix = data_suffix(path)
    if suffix is None:
        kind = f"a {path.suffix} file" if path.suffix else "a file without a suffix"
        raise CommandError(f"{path} is {kind}. Allowed formats are {', '.join(READERS)}.")
    options: dict[str, Any] = {"delimiter": "\t"} if suffix == ".tsv" else {}
    try:
        return load_dataset(READERS[suffix], data_files={split: glob.escape(str(path))}, **options)
    except DatasetsError as error:
        raise CommandError(f"{path} cannot be read: {' '.join(str(error.__cause__ or error).split())}") from error


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


def load_client_files(folder: Path) -> dict[str, Dataset]:
    """
    Load each file of a folder as the dataset of one client.

    Args:
        folder (`Path`): The folder. Hidden files and files in subfolders are not read.

    Returns:
        `dict[str, datasets.Dataset]`: Client id, which is the name of the file without its suffix, to dataset. A
        column without values, and a column of integers with a missing value, have the type of the other files.

    Raises:
        CommandError: If the path is not a folder, if it has no data files, if two files have the same name without
            suffix, or if a file has the name of a split.
    """
    if not folder.is_dir():
        raise CommandError(f"{folder} is not a folder. Give a folder with one file for each client.")
    clients: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        # Hidden files are files of the system, such as `._north.csv` on macOS.
        if path.is_file() and data_suffix(path) is not None and not path.name.startswith("."):
            client_id = _client_id(path)
            if client_id in clients:
                raise CommandError(f"{clients[client_id]} and {path} name the same client {client_id}. Rename a file.")
            clients[client_id] = path
    for client_id, path in clients.items():
        if client_id.lower() in SPLIT_NAMES:
            raise CommandError(
                f"{path} would become the client {client_id}. If it has test examples, move it to another folder and"
                " set data.test_path in the recipe. If it has the examples of a client, rename it."
            )
    if not clients:
        raise CommandError(
            f"{folder} has no data files. Allowed formats are {', '.join(READERS)}. Files in subfolders are not read."
        )
    loaded = {}
    for client_id, path in clients.items():
        with command_errors(str(path)):
            loaded[client_id] = load_file(path, "train")["train"]
    return _with_same_types(loaded)


def _client_id(path: Path) -> str:
    """The name of a file up to its data suffix, such as `st. mary` for `st. mary.csv.gz`."""
    position = max(number for number, suffix in enumerate(path.suffixes) if suffix.lower() in READERS)
    return path.name.removesuffix("".join(path.suffixes[position:]))


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


def check_same_schema(folder: Path) -> None:
    """
    Check that all Parquet files of a folder have the same columns and label names.

    `datasets` reads all files with the features of the first file, so label ids would change their meaning.

    Raises:
        CommandError: If two files differ in their columns or in the order of their label names.
    """
    first: tuple[Path, Features] | None = None
    for path in sorted(folder.rglob("*.parquet")):
        features = Features.from_arrow_schema(pq.read_schema(path))
        first = first or (path, features)
        expected, found = (
            {name: label_names(feature) for name, feature in schema.items()} for schema in (first[1], features)
        )
        if expected != found:
            raise CommandError(
                f"{first[0].relative_to(folder)} and {path.relative_to(folder)} in {folder} differ in their columns or"
                " label names. Write both files with the same features."
            )


def label_names(feature: Any) -> list[str] | None:
    """The label names of a column of labels, or of lists of labels. `None` if the feature has no label names."""
    feature = getattr(feature, "feature", feature)
    return feature.names if isinstance(feature, ClassLabel) else None


def check_single_format(folder: Path) -> None:
    """
    Check that all data files of a folder have the same format, because `datasets` reads only one format.

    Raises:
        CommandError: If the folder has data files of several formats.
    """
    found = {data_suffix(path): path for path in folder.rglob("*") if path.is_file()}
    readers = {READERS[suffix]: path for suffix, path in found.items() if suffix is not None and suffix != ".txt"}
    if len(readers) > 1:
        examples = ", ".join(str(path.relative_to(folder)) for path in readers.values())
        raise CommandError(
            f"{folder} has files of several formats ({examples}), and only one of them would be read. Keep files of"
            " one format."
        )
