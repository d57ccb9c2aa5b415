"""
The columns of data files, from their schemas or headers.

The command line compares them with the columns that a recipe names, before it imports torch and reads any rows. A
file of an unknown format has unknown columns, so that only the columns that no file has are mistakes.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hf_federated.experiments.recipe.schema import RecipeField


# Number of files of a folder that are opened.
MAX_FILES = 1000
# Number of bytes of a text file in which its header is searched, and of a JSON file that is searched for a name.
HEADER_BYTES = 1 << 16
MAX_JSON_BYTES = 1 << 26
SEPARATORS = ",;\t|"
# Number of lines at the start of a text file of which one can be the header.
MAX_TITLE_LINES = 10
PARTITION_FILE = "partition.json"


@dataclass(frozen=True)
class FileColumns:
    """
    The columns of a data file.

    Args:
        path (`Path`): The file.
        names (`Sequence[str]`): The columns, of the first row if the rows of a JSON file differ.
        is_possible (`Callable[[str], bool]`, *optional*): Whether the file can have a column that `names` does not
            contain, because its separator, its encoding or its later rows are not known.
    """

    path: Path
    names: Sequence[str]
    is_possible: Callable[[str], bool] | None = None

    def may_have(self, column: str) -> bool:
        """Whether the file has a column, or can have it."""
        return column in self.names or (self.is_possible is not None and self.is_possible(column))


def missing_column(path: Path, field: str, column: str) -> str | None:
    """
    Describe a column that a field of a recipe names and that no file has.

    Args:
        path (`Path`): A data file, or a folder of data files.
        field (`str`): The field of the recipe, such as `task.text_column`.
        column (`str`): The column.

    Returns:
        `str`, *optional*: The mistake, or `None` if a file has the column or the columns are not known.
    """
    first: FileColumns | None = None
    for number, file in enumerate(_data_files(path)):
        columns = read_columns(file)
        if columns is None or number >= MAX_FILES or columns.may_have(column):
            return None
        first = first or columns
    if first is None:
        return None
    similar = difflib.get_close_matches(column, first.names, n=1)
    hint = f"Did you mean {similar[0]!r}?" if similar else f"Set {field} to one of them."
    return (
        f"{field} is {column!r}, but {first.path} has no such column. Its columns are {', '.join(first.names)}. {hint}"
    )


def named_columns(section: str, fields: dict[str, RecipeField], given: dict[str, object]) -> Iterator[tuple[str, str]]:
    """
    Yield the fields of a section that name columns, with the columns.

    Args:
        section (`str`): `"task"` or `"partition"`.
        fields (`dict[str, RecipeField]`): The fields of the class that the section names.
        given (`dict[str, object]`): The values in the recipe.
    """
    for name, item in fields.items():
        if name == "column" or name.endswith(("_column", "_columns")):
            value = given.get(name) if given.get(name) is not None else item.default
            columns = [value] if isinstance(value, str) else value if isinstance(value, Collection) else []
            yield from ((f"{section}.{name}", column) for column in columns if isinstance(column, str))


def read_columns(path: Path) -> FileColumns | None:
    """
    Read the columns of a Parquet, CSV, TSV or JSON lines file without its rows.

    Args:
        path (`Path`): The file.

    Returns:
        [`FileColumns`], *optional*: The columns, or `None` if the file is compressed, damaged or of another format.
    """
    try:
        match path.suffix.lower():
            case ".parquet":
                import pyarrow.parquet

                return FileColumns(path, pyarrow.parquet.read_schema(path).names)
            case ".csv" | ".tsv":
                return _read_header(path)
            case ".json" | ".jsonl":
                return _read_first_row(path)
    except (OSError, ValueError):  # also the errors of pyarrow, json and codecs; the reader of the rows reports them
        pass
    return None


def _data_files(path: Path) -> Iterator[Path]:
    """The data files of a folder, at most one more than `MAX_FILES`. A federated dataset has only Parquet files."""
    if not path.is_dir():
        yield path
        return
    pattern = "data/**/*.parquet" if (path / PARTITION_FILE).is_file() else "**/*"
    suffixes = (
        ".parquet",
        ".csv",
        ".tsv",
        ".json",
        ".jsonl",
        ".gz",
        ".zst",
        ".xz",
        ".bz2",
        ".arrow",
        ".txt",
        ".xlsx",
        ".xls",
        ".ods",
    )
    files = (file for file in path.glob(pattern) if file.suffix.lower() in suffixes and file.name != PARTITION_FILE)
    yield from islice((file for file in files if not file.name.startswith((".", "_"))), MAX_FILES + 1)


def _read_header(path: Path) -> FileColumns | None:
    with path.open("rb") as file:
        content = file.read(HEADER_BYTES)
    is_wide = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    if b"\0" in content and not is_wide:  # an encoding with wide characters that the file does not name
        return None
    lines = content.decode("utf-16" if is_wide else "utf-8-sig", "ignore").splitlines()
    # Spreadsheet programs write `sep=;` in front of the header.
    header = lines[1:] if lines and lines[0].lower().startswith("sep=") else lines
    if len(header) < 2 or header[0].count('"') % 2 or not header[0].strip():
        return None  # the header is longer, or has a line break in a name
    separator = max(SEPARATORS, key=header[0].count)
    names = next(csv.reader([header[0]], delimiter=separator))
    # The header can also follow a title.
    words = {word.strip() for line in lines[:MAX_TITLE_LINES] for word in re.split(f'["{SEPARATORS}]', line)}
    # A name in quotes can contain separators.
    start = "\n".join(lines[:MAX_TITLE_LINES]).replace('""', '"')
    # The encoding of other characters is not known.
    return FileColumns(
        path, names, lambda column: column.strip() in words or f'"{column}"' in start or not column.isascii()
    )


def _read_first_row(path: Path) -> FileColumns | None:
    if path.stat().st_size > MAX_JSON_BYTES:
        return None
    with path.open("rb") as file:
        first = json.loads(file.readline())
    if not isinstance(first, dict):
        return None
    # Later rows can have further keys. JSON can escape characters of a key.
    return FileColumns(
        path, list(first), lambda column: not column.isascii() or f'"{column}"'.encode() in path.read_bytes()
    )
