"""Convert rows of text into batches with types, as pandas infers them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .table import BATCH_ROWS, Batch, TableError


# The line at which each row starts, and the values of each row.
TextRows: TypeAlias = "tuple[list[int], list[list[str]]]"
# The texts that pandas reads as missing values.
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
DECIMAL_COMMA = r"^[+-]?\d+,\d+$"
PLAIN_INTEGER = r"^[+-]?\d+$"
THOUSANDS = r"^[+-]?\d{1,3}([.,]\d{3})+$"
# `007` and `01,2`, but not `0,5` and `00.5`.
LEADING_ZERO = r"^\s*[+-]?0+([1-9]|0\s*$)"
TYPE_NAMES = {"int64": "whole numbers", "uint64": "whole numbers", "double": "numbers", "bool": "true or false"}
READ_AS_TEXT = "read the column as text with data.csv.text_columns in a recipe or --csv-text-columns"


@dataclass
class RowConverter:
    """
    Convert rows of text into batches.

    The first batch determines the types of the columns, as in `datasets.load_dataset("csv")`. pandas converts the
    values, so a file has the same types and values in both readers.

    Args:
        path (`Path`): The file, for error messages.
        columns (`Sequence[str]`): The names of the columns.
        text_columns (`Sequence[str]`): Columns that are text, even if all their values are numbers.
        decimal_comma (`bool`, *optional*, defaults to `False`): Whether `1,5` is a number.
        notes_thousands (`bool`, *optional*, defaults to `False`): Whether to name columns with values such as `1.234`,
            which may be thousands.
        notes (`list[str]`): Receives sentences about values that a reader may not expect.
    """

    path: Path
    columns: Sequence[str]
    text_columns: Sequence[str] = ()
    decimal_comma: bool = False
    notes_thousands: bool = False
    notes: list[str] = field(default_factory=list)

    def batches(self, read: Callable[[], Iterator[TextRows]], as_text: bool) -> Iterator[Batch]:
        """
        Convert the rows.

        Args:
            read (`Callable`): Starts to read the rows.
            as_text (`bool`): Whether all columns are text.
        """
        schema: pa.Schema | None = None
        commas: list[str] = []
        noted: set[str] = set()
        for lines, rows in read():
            starts = np.array(lines, dtype=np.int64)
            if as_text:
                yield starts, text_batch(rows, self.columns)
                continue
            if schema is None:
                schema, commas = self._infer(rows, read)
                self._note_thousands(schema, rows)
            texts = [field.name for field in schema if is_text(field.type)]
            self._refuse_points(lines, rows, commas)
            numbers = self._with_points(rows, commas)
            batch = self._convert(numbers, texts)
            arrays = [
                self._cast(batch.column(place), field, lines, numbers, place) for place, field in enumerate(schema)
            ]
            self._note_leading_zeros(schema, arrays, lines, rows, noted)
            yield starts, pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _infer(self, rows: list[list[str]], read: Callable[[], Iterator[TextRows]]) -> tuple[pa.Schema, list[str]]:
        """The types of the columns, and the columns with decimal commas."""
        batch = self._convert(rows, self.text_columns)
        schema = batch.schema
        if self.decimal_comma:
            commas = [
                field.name
                for field, column in zip(schema, batch.columns, strict=True)
                if is_text(field.type) and field.name not in self.text_columns and _has_decimal_commas(column)
            ]
            schema = self._convert(self._with_points(rows, commas), self.text_columns).schema
        else:
            commas = []
        empty = {
            field.name
            for field, column in zip(schema, batch.columns, strict=True)
            if column.null_count == len(column) and field.name not in self.text_columns
        }
        if empty and len(rows) == BATCH_ROWS:
            schema = self._infer_later(schema, empty, commas, read)
        for name in commas:
            self._note(f"The column {name!r} has decimal commas, so 1,5 is read as 1.5.")
        return schema, commas

    def _infer_later(
        self, schema: pa.Schema, empty: set[str], commas: list[str], read: Callable[[], Iterator[TextRows]]
    ) -> pa.Schema:
        """Give a column without values in the first batch the type of the first batch in which it has a value."""
        for _, rows in read():
            batch = self._convert(self._with_points(rows, commas), self.text_columns)
            for place, found in enumerate(batch.schema):
                if found.name in empty and batch.column(place).null_count < len(rows):
                    empty.discard(found.name)
                    # Integers next to missing values are floats, as in the first batch.
                    kind = pa.float64() if pa.types.is_integer(found.type) else found.type
                    schema = schema.set(place, found.with_type(kind))
            if not empty:
                break
        return schema

    def _note(self, note: str) -> None:
        if note not in self.notes:  # The batches can be read again.
            self.notes.append(note)

    def _note_thousands(self, schema: pa.Schema, rows: list[list[str]]) -> None:
        """Name the columns of numbers whose values all have three digits after a point or a comma."""
        for place, column in enumerate(schema):
            if self.notes_thousands and pa.types.is_floating(column.type):
                values = [row[place] for row in rows if row[place] not in MISSING]
                if values and pc.all(pc.match_substring_regex(pa.array(values), THOUSANDS)).as_py():
                    self._note(
                        f"The values of the column {column.name!r} may be thousands, but {values[0]} is read as"
                        f" {float(values[0].replace(',', '.'))}. If they are thousands, remove the separators, or"
                        f" {READ_AS_TEXT}. If they are decimal numbers, set data.csv.decimal in a recipe or"
                        " --csv-decimal."
                    )

    def _refuse_points(self, lines: list[int], rows: list[list[str]], commas: Sequence[str]) -> None:
        """Raise a [`TableError`] about the first value with a point in a column with decimal commas."""
        for place, name in enumerate(self.columns):
            if name not in commas:
                continue
            for line, row in zip(lines, rows, strict=True):
                if "." in row[place] and row[place] not in MISSING:
                    raise TableError(
                        f"{self.path}, line {line}, column {name!r}: the value {row[place][:50]!r} has a point, but"
                        f" the first {BATCH_ROWS} rows have decimal commas, so its point may separate thousands."
                        f" Remove the point, write a decimal comma, or {READ_AS_TEXT}."
                    )

    def _note_leading_zeros(
        self, schema: pa.Schema, arrays: list[pa.Array], lines: list[int], rows: list[list[str]], noted: set[str]
    ) -> None:
        """Name the first number with leading zeros of each column that is not in `noted`."""
        for place, column in enumerate(schema):
            is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
            if is_number and column.name not in noted:
                values = pa.array([row[place] for row in rows])
                found = pc.index(pc.match_substring_regex(values, LEADING_ZERO), True).as_py()
                if found >= 0:
                    noted.add(column.name)
                    self._note(
                        f"The column {column.name!r} has numbers with leading zeros, such as {rows[found][place]} on"
                        f" line {lines[found]}, which is read as {arrays[place][found].as_py()}. To keep the zeros,"
                        f" {READ_AS_TEXT}."
                    )

    def _with_points(self, rows: list[list[str]], commas: Sequence[str]) -> list[list[str]]:
        """Write the numbers of some columns with decimal points."""
        places = {place for place, name in enumerate(self.columns) if name in commas}
        if not places:
            return rows
        return [
            [value.replace(",", ".") if place in places else value for place, value in enumerate(row)] for row in rows
        ]

    def _convert(self, rows: list[list[str]], texts: Sequence[str]) -> pa.RecordBatch:
        """Convert rows with pandas, of which the columns `texts` stay text."""
        import pandas as pd

        stream = io.StringIO(newline="")
        # The terminator has both characters of line breaks, so that the writer quotes values with either.
        csv.writer(stream, lineterminator="\r\n").writerows(rows)
        stream.seek(0)
        numbers = {name: place for place, name in enumerate(self.columns)}
        frame = pd.read_csv(
            stream,
            header=None,
            index_col=False,
            skip_blank_lines=False,
            dtype={numbers[name]: str for name in texts if name in numbers},
        )
        frame.columns = list(self.columns)
        try:
            return pa.RecordBatch.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        except OverflowError:
            # pandas reads integers of more than 64 bits as Python integers, which become text.
            objects = [name for name in frame.columns if frame[name].dtype == object and name not in texts]
            large = [name for name in objects if any(isinstance(value, int) for value in frame[name])]
            if not large:
                raise
            return self._convert(rows, [*texts, *large])

    def _cast(
        self, column: pa.Array, field: pa.Field, lines: list[int], rows: list[list[str]], place: int
    ) -> pa.Array:
        if column.type == field.type:
            return column
        has_values = column.null_count < len(column)
        # pyarrow casts 1 and "1" to true, true to 1, and "0x1F" to 31.
        is_other_text = is_text(column.type) and not is_text(field.type)
        if is_other_text or (has_values and pa.types.is_boolean(column.type) != pa.types.is_boolean(field.type)):
            self._check_values(field, lines, rows, place)
        try:
            return column.cast(field.type)
        except pa.ArrowInvalid as error:
            self._check_values(field, lines, rows, place)
            line, value = _first_unfit(column, field.type, lines, [row[place] for row in rows])
            kind = TYPE_NAMES.get(str(field.type), str(field.type))
            raise TableError(
                f"{self.path}, line {line}, column {field.name!r}: the value {value[:50]!r} is out of the range of the"
                f" values of the first {BATCH_ROWS} rows, which are {kind} ({field.type}). Correct the value, or"
                f" {READ_AS_TEXT}."
            ) from error

    def _check_values(self, field: pa.Field, lines: list[int], rows: list[list[str]], place: int) -> None:
        """Raise a [`TableError`] about the first value of a column that has another type than the first batch."""
        for line, row in zip(lines, rows, strict=True):
            if not _is_value(row[place], field.type):
                raise TableError(
                    f"{self.path}, line {line}, column {field.name!r}: the value {row[place][:50]!r} has another"
                    f" type than the values of the first {BATCH_ROWS} rows, which are"
                    f" {TYPE_NAMES.get(str(field.type), str(field.type))}. Correct the value, or"
                    f" {_cure(row[place], field.type)}."
                )


def _first_unfit(column: pa.Array, kind: pa.DataType, lines: list[int], texts: list[str]) -> tuple[int, str]:
    """The line and the text of the first value that cannot have a type."""
    for place, (line, text) in enumerate(zip(lines, texts, strict=True)):
        try:
            column.slice(place, 1).cast(kind)
        except pa.ArrowInvalid:
            return line, text
    return lines[0], texts[0]


def text_batch(rows: list[list[str]], columns: Sequence[str]) -> pa.RecordBatch:
    """A batch of text, in which the texts that pandas reads as missing values are null."""
    missing = pa.array(MISSING)
    arrays = []
    for values in zip(*rows, strict=True):
        column = pa.array(values, type=pa.string())
        arrays.append(pc.if_else(pc.is_in(column, missing), pa.scalar(None, pa.string()), column))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _cure(text: str, kind: pa.DataType) -> str:
    if pa.types.is_integer(kind) and _is_value(text, pa.float64()) and not text.lstrip("+-").isdecimal():
        return "write the number of the first row as a decimal number, such as 3.0"
    return READ_AS_TEXT


def is_text(kind: pa.DataType) -> bool:
    """Whether a type is text. pandas 3 writes large strings, and earlier versions strings."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _has_decimal_commas(column: pa.Array) -> bool:
    commas = pc.match_substring_regex(column, DECIMAL_COMMA)
    numbers = pc.or_(commas, pc.match_substring_regex(column, PLAIN_INTEGER))
    return bool(pc.any(commas).as_py() and pc.all(numbers).as_py())


def _is_value(text: str, kind: pa.DataType) -> bool:
    """Whether pandas reads a text as a missing value or as a value of a type."""
    if text in MISSING:
        return True
    if pa.types.is_boolean(kind):
        return text in ("True", "TRUE", "true", "False", "FALSE", "false")
    try:
        number = float(text)
    except ValueError:
        return False
    if "_" in text:  # a number in Python only
        return False
    return not pa.types.is_integer(kind) or number.is_integer()
