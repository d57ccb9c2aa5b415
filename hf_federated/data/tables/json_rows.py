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
BLANKS = re.compile(r"[ \t\r\n,]*")


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
    return Table(
        path,
        "JSON",
        columns,
        lambda as_text: _batches(path, _rows(path, text_format.encoding), columns),
        text_format,
    )


def _batches(path: Path, rows: Iterator[tuple[int, dict[str, Any]]], columns: Sequence[str]) -> Iterator[Batch]:
    schema: pa.Schema | None = None
    while part := list(islice(rows, BATCH_ROWS)):
        lines = [line for line, _ in part]
        arrays = [_column(name, part, schema, path) for name in columns]
        schema = schema or pa.schema(list(zip(columns, (array.type for array in arrays), strict=True)))
        yield np.array(lines, dtype=np.int64), pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, part: list[tuple[int, dict[str, Any]]], schema: pa.Schema | None, path: Path) -> pa.Array:
    values = [row.get(name) for _, row in part]
    kind = None if schema is None else schema.field(name).type
    if kind is not None and pa.types.is_null(kind):
        kind = pa.string()
        values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        if kind is None or pa.types.is_string(kind):
            # Values of several types are text, as `datasets` reads them.
            return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())
        for line, row in part:
            try:
                pa.array([row.get(name)], type=kind)
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
                value = json.dumps(row.get(name), ensure_ascii=False)[:50]
                raise TableError(
                    f"{path}, line {line}, column {name!r}: the value {value} has another type than the values of the"
                    f" first {BATCH_ROWS} rows, which are {kind}. Correct the value."
                ) from error
        raise


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
                    f"{path}, line {number}: {json.dumps(row, ensure_ascii=False)[:50]} is no JSON object. Write each"
                    ' row as an object, such as {"text": "hello", "label": "fine"}.'
                )
            yield number, row


def _lines(path: Path, lines: Iterator[str], number: int) -> Iterator[tuple[int, Any]]:
    numbered = enumerate(lines, start=number)
    for position, text in numbered:
        if text.strip():
            try:
                value = json.loads(text)
            except (json.JSONDecodeError, RecursionError) as error:
                value = _several_lines(path, position, text, numbered, error)
            yield position, value


def _several_lines(path: Path, position: int, text: str, numbered: Iterator[tuple[int, str]], error: Exception) -> Any:
    """The object that starts on a line and ends on a later line. Only lines that end with a brace are tried."""
    whole = text
    for _, line in numbered:
        whole += line
        if len(whole) > READ_CHARACTERS:
            break
        if line.rstrip().endswith("}"):
            with suppress(json.JSONDecodeError, RecursionError):
                return json.loads(whole)
    character, message = (
        (error.colno, error.msg) if isinstance(error, json.JSONDecodeError) else (1, "too many levels")
    )
    raise TableError(_invalid(path, position, character, message, text)) from error


def _array(path: Path, file: io.TextIOWrapper, line: int) -> Iterator[tuple[int, Any]]:
    """The values of an array, of which one value at a time is in memory."""
    decoder = json.JSONDecoder()
    text, place = "", 0
    is_end = False
    while True:
        skipped = next(BLANKS.finditer(text, place)).end()
        line += text.count("\n", place, skipped)
        place = skipped
        if text[place : place + 1] == "]":
            return
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
        else:
            yield line, value
            line += text.count("\n", place, end)
            place = end


def _invalid(path: Path, line: int, column: int, message: str, text: str) -> str:
    return (
        f"{path}, line {line}, character {column}: the text is no valid JSON: {message}. The text is"
        f" {text.strip()[:60]!r}. Correct the text, or write one JSON object on each line."
    )
