"""The rows that the checks read: tables, their batches, and the columns of texts, labels and sites."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..tables import Table, TableError


# Names of columns, in the order in which they are looked for.
TEXT_NAMES = ("text", "sentence", "review", "content", "document", "tokens", "words", "question", "body", "message")
LABEL_NAMES = ("label", "labels", "target", "class", "category", "ner_tags", "tags", "sentiment", "topic")
TRAIN, TEST = "train", "test"
# A column of this name in a batch has the client of each row. No column of a user has such a name.
CLIENT_COLUMN = "\0client"


@dataclass(frozen=True)
class SiteTable:
    """
    The rows of one file, or of one site of a dataset in memory.

    Args:
        name (`str`): The name for messages, such as a path. Empty for rows in memory.
        site (`str`, *optional*): The site of all rows. `None` if a column has the site of each row.
        columns (`Sequence[str]`): The names of the columns.
        batches (`Callable`): Starts an iteration over the line numbers, as an array of integers, and the rows of each
            batch.
        split (`str`, *optional*, defaults to `"train"`): `"train"` or `"test"`.
        unit (`str`, *optional*, defaults to `"line"`): What the line numbers count: `"line"` or `"row"`.
        label_names (`dict[str, list[str]]`, *optional*): The names of the labels of each column of `ClassLabel`.
        file (`Table`, *optional*): The file of the rows, if it was read as a table of the user.
        error (`str`, *optional*, defaults to `""`): Why the file cannot be read. Empty if it can.
        is_empty (`bool`, *optional*, defaults to `False`): Whether the file cannot be read because it has no rows.
    """

    name: str
    site: str | None
    columns: Sequence[str]
    batches: Callable[[], Iterator[tuple[np.ndarray, pa.RecordBatch | pa.Table]]]
    split: str = TRAIN
    unit: str = "line"
    label_names: Mapping[str, list[str]] = field(default_factory=dict)
    file: Table | None = None
    error: str = ""
    is_empty: bool = False

    def read(self, as_text: bool = False) -> Iterator[tuple[np.ndarray, pa.RecordBatch | pa.Table]]:
        """
        Read the batches.

        Args:
            as_text (`bool`, *optional*, defaults to `False`): Whether the values of a CSV file keep their text.

        Raises:
            TableError: If a row of the file cannot be read.
        """
        try:
            yield from self.file.batches(as_text=True) if as_text and self.file is not None else self.batches()
        except (OSError, EOFError, UnicodeError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            if not self.name:
                raise
            reason = " ".join(str(error).split())
            raise TableError(f"{self.name} is damaged: {reason}. Write or copy it again.") from error

    @cached_property
    def schema(self) -> pa.Schema:
        """The names and types of the columns in the first batch. Without rows that can be read, the types are null."""
        try:
            for _, rows in self.read():
                return rows.schema
        except TableError:
            pass  # the error is reported when all rows are read
        return pa.schema([(name, pa.null()) for name in self.columns])


@dataclass(frozen=True, eq=False)
class Batch:
    """
    Rows of a table.

    Args:
        table ([`SiteTable`]): The table.
        sites (`np.ndarray` of shape `(num_rows,)`, `int64`): The position of each row's site in the list of sites.
        lines (`np.ndarray` of shape `(num_rows,)`, `int64`): The line number of each row.
        rows (`pyarrow.RecordBatch` or `pyarrow.Table`): The rows.
    """

    table: SiteTable
    sites: np.ndarray
    lines: np.ndarray
    rows: pa.RecordBatch | pa.Table

    def column(self, name: str | None) -> pa.Array | None:
        """The values of a column as one array, or `None` if the rows have no such column."""
        if name is None or name not in self.rows.schema.names:
            return None
        values = self.rows.column(name)
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        # Categories of pandas are read as the values that they name.
        is_encoded = pa.types.is_dictionary(values.type) and name != CLIENT_COLUMN
        return values.dictionary_decode() if is_encoded else values


@dataclass(frozen=True)
class Columns:
    """
    The columns that the checks read.

    Args:
        texts (`Sequence[str]`): The columns of texts, or of lists of words.
        label (`str`, *optional*): The column of labels, or of lists of tags.
        site (`str`, *optional*): The column with the site of each row.
    """

    texts: Sequence[str] = ()
    label: str | None = None
    site: str | None = None


def find_columns(
    tables: Sequence[SiteTable], texts: Sequence[str] | None = None, label: str | None = None, site: str | None = None
) -> Columns:
    """
    Choose the columns of texts and labels that the user does not name, by their names and types.

    Args:
        tables (`Sequence[SiteTable]`): The tables.
        texts (`Sequence[str]`, *optional*): The columns of texts that the user names. Empty to check no texts.
        label (`str`, *optional*): The column of labels that the user names. Empty if the examples have no labels.
        site (`str`, *optional*): The column of sites that the user names.

    Raises:
        ValueError: If no table has a column that the user names.
    """
    types: dict[str, pa.DataType] = {}
    for table in tables:
        for item in table.schema:
            if types.get(item.name, pa.null()) == pa.null():
                types[item.name] = item.type
    for name in filter(None, (*(texts or ()), label, site)):
        if types and name not in types:
            raise ValueError(f"There is no column {name!r}. The columns are: {', '.join(types)}.")
    lower = {name.lower(): name for name in reversed(types)}
    if label is None:
        label = next((lower[name] for name in LABEL_NAMES if name in lower and lower[name] not in (texts or ())), None)
    if texts is None:
        named = [lower[name] for name in TEXT_NAMES if name in lower]
        text = next((name for name in named if _is_text(types[name])), next(iter(named), None))
        texts = () if text is None or text == label else (text,)
    return Columns(tuple(texts), label or None, site)


def is_list(arrow_type: pa.DataType) -> bool:
    """Whether the values of an Arrow type are lists, such as lists of words or tags."""
    return bool(
        pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type)
    )


def is_string(arrow_type: pa.DataType) -> bool:
    """Whether the values of an Arrow type are strings."""
    return bool(
        pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type) or pa.types.is_string_view(arrow_type)
    )


def _is_text(arrow_type: pa.DataType) -> bool:
    return is_string(arrow_type) or (is_list(arrow_type) and is_string(arrow_type.value_type))


def blank(values: pa.Array) -> np.ndarray:
    """Whether each value is missing: null, NaN, a string of whitespace, or a list without values or without words."""
    if is_string(values.type):
        found = pc.equal(pc.utf8_trim_whitespace(values), "").fill_null(True)
    elif is_list(values.type) and is_string(values.type.value_type):
        rows = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
        return np.bincount(rows[~blank(values.flatten())], minlength=len(values)) == 0
    elif is_list(values.type):
        found = pc.equal(pc.list_value_length(values), 0).fill_null(True)
    elif pa.types.is_floating(values.type):
        found = values.is_null(nan_is_null=True)
    else:
        found = values.is_null()
    return found.to_numpy(zero_copy_only=False)
