"""Read JSON files: one object a line, or one array of objects."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .byte_stream import open_bytes
from .encodings import find_encoding
from .table import BATCH_ROWS, Batch, EmptyTableError, Table, TableError
from .text_format import TableOptions, TextFormat


READ_CHARACTERS = 1 << 20
# Python reads no integers of more digits than 4,300.
LONG_NUMBER = "a number has too many digits. Write the number in quotes"
BLANKS = re.compile(r"[ \t\r\n]*")


def read_json(path: Path, options: TableOptions) -> Table:
    """
    Read the columns of a JSON file.

    Raises:
        TableError: If the file is empty or its first rows are no JSON objects.
    """
    text_format = TextFormat(find_encoding(path, options.encoding))
    rows = _rows(path, text_format.encoding)
    first = list(islice(rows, BATCH_ROWS))
    if not first:
        raise EmptyTableError(f"{path} has no rows. Write one JSON object on each line.")
    columns = list(dict.fromkeys(chain.from_iterable(row for _, row in first)))
    for name in columns:
        if not _is_text(name):
            raise TableError(_no_text(path, next(line for line, row in first if name in row), name, name))
    return Table(
        path,
        "JSON",
        columns,
        lambda as_text: _batches(path, _rows(path, text_format.encoding), columns),
        text_format,
    )


def _batches(path: Path, rows: Iterator[tuple[int, dict[str, Any]]], columns: Sequence[str]) -> Iterator[Batch]:
    schema: pa.Schema | None = None
    names = set(columns)
    while part := list(islice(rows, BATCH_ROWS)):
        lines = [line for line, _ in part]
        for line, row in part:
            if not names.issuperset(row):
                raise TableError(_unknown_column(path, line, row, names))
        arrays = [_column(name, part, schema, path) for name in columns]
        if schema is None and len(part) == BATCH_ROWS:
            # A column without values so far is text, for its later values.
            arrays = [array.cast(pa.string()) if pa.types.is_null(array.type) else array for array in arrays]
        schema = schema or pa.schema(list(zip(columns, (array.type for array in arrays), strict=True)))
        yield np.array(lines, dtype=np.int64), pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, part: list[tuple[int, dict[str, Any]]], schema: pa.Schema | None, path: Path) -> pa.Array:
    values = [row.get(name) for _, row in part]
    kind = None if schema is None else schema.field(name).type
    if kind is not None and pa.types.is_string(kind):
        return _texts(values)
    try:
        return _typed(values, kind)
    except UnicodeEncodeError as error:
        line, row = next((line, row) for line, row in part if not _is_text(row.get(name)))
        raise TableError(_no_text(path, line, name, row.get(name))) from error
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        if kind is None:
            # Values of several types are text, as `datasets` reads them.
            return _texts(values)
        for line, row in part:
            try:
                _typed([row.get(name)], kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
                raise TableError(
                    f"{path}, line {line}, column {name!r}: the value {_shown(row.get(name))} has another type than"
                    f" the values of the first {BATCH_ROWS} rows, which are {kind}. Correct the value, or move a row"
                    " with such a value to the start of the file."
                ) from error
        raise


def _texts(values: list[Any]) -> pa.Array:
    return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())


def _typed(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    """Convert values to a type. pyarrow alone would drop the decimals of numbers and the keys of objects."""
    found = pa.array(values)
    if kind is None or found.type == kind:
        return found
    if not _keeps_values(found.type, kind):
        raise pa.ArrowTypeError(f"{found.type} values in a column of {kind}")
    return pa.array(values, type=kind)


def _keeps_values(found: pa.DataType, kind: pa.DataType) -> bool:
    """Whether values of the type `found` are the same values with the type `kind`."""
    if pa.types.is_struct(found) and pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return all(field.name in fields and _keeps_values(field.type, fields[field.name]) for field in found)
    if pa.types.is_list(found) and pa.types.is_list(kind):
        return _keeps_values(found.value_type, kind.value_type)
    if pa.types.is_integer(found):
        return pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return pa.types.is_null(found) or found == kind


def _unknown_column(path: Path, line: int, row: dict[str, Any], names: set[str]) -> str:
    name = next(name for name in row if name not in names)
    return (
        f"{path}, line {line}, column {_shown(name)}: the first {BATCH_ROWS} rows do not have this column, here with"
        f" the value {_shown(row[name])}. Correct the name, or move a row with this column to the start of the file."
    )


def _is_text(value: Any) -> bool:
    """Whether a value has no halves of characters, such as `"\\ud800"`."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_text(path: Path, line: int, name: str, value: Any) -> str:
    return (
        f"{path}, line {line}, column {_shown(name)}: {_shown(value)} has half of a character (a surrogate), which is"
        " no text. Write the whole character, or remove the half."
    )


def _shown(value: Any) -> str:
    """The start of a value as JSON, which can be printed in each case."""
    return json.dumps(value, ensure_ascii=False)[:50].encode(errors="backslashreplace").decode()


def _rows(path: Path, encoding: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line at which each object starts, and the object."""
    with io.TextIOWrapper(open_bytes(path), encoding=encoding) as file:
        start = file.read(1)
        line = 1
        while start.isspace():
            line += start == "\n"
            start = file.read(1)
        found = (
            _array(path, file, line) if start == "[" else _lines(path, chain([start + file.readline()], file), line)
        )
        for number, row in found:
            if start == "[" and isinstance(row, str):
                row = {"text": row}  # as in `datasets`
            if not isinstance(row, dict):
                raise TableError(
                    f"{path}, line {number}: {_shown(row)} is no JSON object. Write each"
                    ' row as an object, such as {"text": "hello", "label": "fine"}.'
                )
            yield number, row


def _lines(path: Path, lines: Iterator[str], number: int) -> Iterator[tuple[int, Any]]:
    numbered = enumerate(lines, start=number)
    for position, text in numbered:
        if text.strip():
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                value = _several_lines(path, position, text, numbered, error)
            yield position, value


def _several_lines(path: Path, position: int, text: str, numbered: Iterator[tuple[int, str]], error: Exception) -> Any:
    """The object that starts on a line and ends on a later line. Only lines that end with a brace are tried."""
    if _is_long_number(error):
        raise TableError(_invalid(path, position, 1, LONG_NUMBER, text)) from error
    whole = text
    for _, line in numbered:
        whole += line
        if len(whole) > READ_CHARACTERS:
            break
        if line.rstrip().endswith("}"):
            with suppress(json.JSONDecodeError, RecursionError):
                try:
                    return json.loads(whole)
                except ValueError as cause:
                    if _is_long_number(cause):
                        raise TableError(_invalid(path, position, 1, LONG_NUMBER, text)) from cause
                    raise
    character, message = (
        (error.colno, error.msg) if isinstance(error, json.JSONDecodeError) else (1, "too many levels")
    )
    raise TableError(_invalid(path, position, character, message, text)) from error


def _is_long_number(error: Exception) -> bool:
    return isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)


def _array(path: Path, file: io.TextIOWrapper, line: int) -> Iterator[tuple[int, Any]]:
    """The values of an array, of which one value at a time is in memory."""
    decoder = json.JSONDecoder()
    text, place = "", 0
    is_end = False
    previous = "["
    while True:
        skipped = next(BLANKS.finditer(text, place)).end()
        line += text.count("\n", place, skipped)
        place = skipped
        sign = text[place : place + 1]
        if not sign and not is_end:
            text, place = file.read(READ_CHARACTERS), 0
            is_end = not text
            continue
        if sign == "]" and previous != ",":
            _check_end(path, file, line, text[place + 1 :])
            return
        if previous == "value" and sign:
            if sign != ",":
                message = "a comma is missing between two values of the array"
                raise TableError(_invalid(path, line, 1, message, text[place : place + 80]))
            previous, place = ",", place + 1
            continue
        try:
            value, end = decoder.raw_decode(text, place)
        except RecursionError as error:
            raise TableError(_invalid(path, line, 1, "too many levels", text[place : place + 80])) from error
        except json.JSONDecodeError as error:
            if is_end:
                message = "the array is not closed" if place >= len(text) else error.msg
                at = line + text.count("\n", place, error.pos)
                raise TableError(_invalid(path, at, error.colno, message, text[place : place + 80])) from error
            more = file.read(max(READ_CHARACTERS, len(text) - place))
            text, place, is_end = text[place:] + more, 0, not more
        except ValueError as error:
            raise TableError(_invalid(path, line, 1, LONG_NUMBER, text[place : place + 80])) from error
        else:
            yield line, value
            line += text.count("\n", place, end)
            place, previous = end, "value"


def _check_end(path: Path, file: io.TextIOWrapper, line: int, text: str) -> None:
    """Refuse text after the end of an array."""
    while text or (text := file.read(READ_CHARACTERS)):
        rest = text.lstrip()
        line += text.count("\n", 0, len(text) - len(rest))
        if rest:
            raise TableError(_invalid(path, line, 1, "there is text after the end of the array", rest[:80]))
        text = ""


def _invalid(path: Path, line: int, column: int, message: str, text: str) -> str:
    return (
        f"{path}, line {line}, character {column}: the text is no valid JSON: {message}. The text is"
        f" {text.strip()[:60]!r}. Correct the text, or write one JSON object on each line."
    )
