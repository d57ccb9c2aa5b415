"""Read CSV files row by row, with the line at which each row starts."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .byte_stream import open_bytes
from .encodings import check_zeros, find_encoding
from .separators import HOW_TO_SET, SAMPLE_CHARACTERS, find_separator
from .table import BATCH_ROWS, EmptyTableError, Table, TableError
from .text_format import NO_QUOTES, TableOptions, TextFormat, printable_separator
from .typed_rows import RowConverter, TextRows


# Excel reads a first line such as `sep=;` as the separator of the file.
SEPARATOR_LINE = re.compile(r"sep=(.)\r?\n?", re.IGNORECASE)


def read_delimited(path: Path, options: TableOptions, default: str) -> Table:
    """
    Find the format of a CSV file, and read its header.

    Args:
        path (`Path`): The file.
        options ([`TableOptions`]): What is known about the file.
        default (`str`): The usual separator of files with this suffix.

    Raises:
        TableError: If the format is ambiguous, the file has no rows, or a column name is used twice.
    """
    text_format = find_format(path, options, default)
    rows = _rows(path, text_format, None)
    header = next(rows, None)
    if header is None:
        raise EmptyTableError(f"{path} is empty. Write a line with the names of the columns, and a line for each row.")
    columns = column_names(path, header[0][0], header[1][0])
    if next(rows, None) is None:
        raise EmptyTableError(
            f"{path}, line {header[0][0]}: the file has the columns {', '.join(columns)}, but no rows. Add rows, or"
            " remove the file."
        )
    converter = RowConverter(
        path,
        columns,
        options.text_columns,
        decimal_comma=text_format.decimal == ",",
        notes_thousands=text_format.separator == ";" and options.decimal is None,
    )
    return Table(
        path,
        "CSV",
        columns,
        lambda as_text: converter.batches(lambda: _rows(path, text_format, columns), as_text),
        text_format,
        converter.notes,
    )


def find_format(path: Path, options: TableOptions, default: str) -> TextFormat:
    """The format of a CSV file: the options that are set, and what the file shows for the others."""
    encoding = find_encoding(path, options.encoding)
    check_zeros(path, encoding)
    with _open_text(path, encoding) as file:
        sample = file.read(SAMPLE_CHARACTERS)
    quote = None if options.quote == NO_QUOTES else options.quote or '"'
    announced = SEPARATOR_LINE.match(sample)
    separator = options.separator or (announced and announced[1])
    if separator is None:
        separator = find_separator(path, sample, default, quote)
    decimal = options.decimal or ("," if separator == ";" else ".")
    return TextFormat(encoding, separator, quote, decimal, 2 if announced else 1)


def _open_text(path: Path, encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_bytes(path), encoding=encoding, newline="")


@contextmanager
def _long_values() -> Iterator[None]:
    """Allow values of more than 131,072 characters, the default limit of `csv`."""
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _rows(path: Path, text_format: TextFormat, columns: Sequence[str] | None) -> Iterator[TextRows]:
    """
    Read the rows of a file in batches. Blank lines are no rows.

    Args:
        path (`Path`): The file.
        text_format ([`TextFormat`]): The format of the file.
        columns (`Sequence[str]`, *optional*): The names of the columns. `None` to read the header and the first row,
            as two batches of one row.
    """
    size = 1 if columns is None else BATCH_ROWS
    with _open_text(path, text_format.encoding) as file:
        for _ in range(text_format.header_line - 1):
            file.readline()
        offset = text_format.header_line
        reader = csv.reader(
            file,
            delimiter=text_format.separator or ",",
            quotechar=text_format.quote or '"',
            quoting=csv.QUOTE_NONE if text_format.quote is None else csv.QUOTE_MINIMAL,
            strict=True,
        )
        is_header = columns is not None
        while True:
            lines: list[int] = []
            rows: list[list[str]] = []
            before = reader.line_num
            try:
                with _long_values():
                    for row in reader:
                        # `""` is a row with a missing value, and `[]` or blanks are an empty line.
                        if len(row) > 1 or (row and (not row[0] or row[0].strip(" \t"))):
                            lines.append(before + offset)
                            rows.append(row)
                            if len(rows) == size + is_header:
                                break
                        before = reader.line_num
            except csv.Error as error:
                raise TableError(_broken_row(path, text_format, before + offset, reader.line_num, error)) from error
            if is_header:
                lines, rows, is_header = lines[1:], rows[1:], False
            if not rows:
                return
            if columns is not None:
                rows = _of_same_length(path, text_format, lines, rows, columns)
            yield lines, rows


def _broken_row(path: Path, text_format: TextFormat, line: int, last: int, error: csv.Error) -> str:
    end = last + text_format.header_line - 1
    if "unexpected end" in str(error):
        return (
            f"{path}, line {line}: a quote ({text_format.quote}) is opened in the row that starts here, and never"
            f" closed: the file ends on line {end}. Close the quote, or, if quotes are ordinary characters of the"
            f" file, set data.csv.quote in a recipe or --csv-quote to {NO_QUOTES}."
        )
    if "expected after" in str(error):
        return (
            f"{path}, line {line}: in the row that starts here, a closing quote ({text_format.quote}) on line {end} is"
            f" followed by text and not by the separator. Write a quote within a value twice"
            f" ({text_format.quote}{text_format.quote}), or, if quotes are ordinary characters of the file, set"
            f" data.csv.quote in a recipe or --csv-quote to {NO_QUOTES}."
        )
    return f"{path}, line {line}: the row cannot be read: {error}. Correct the row."


def _of_same_length(
    path: Path, text_format: TextFormat, lines: list[int], rows: list[list[str]], columns: Sequence[str]
) -> list[list[str]]:
    """Fill rows that lack their last values, as spreadsheets write them, with missing values. Refuse longer rows."""
    num_columns = len(columns)
    if set(map(len, rows)) == {num_columns}:
        return rows
    for line, row in zip(lines, rows, strict=True):
        if len(row) > num_columns:
            separator = printable_separator(text_format.separator or ",")
            raise TableError(
                f"{path}, line {line}: the row has {len(row)} values, but the header has {num_columns} columns"
                f" ({', '.join(columns)[:100]}). The first extra value is {row[num_columns][:50]!r}. The separator is"
                f" {separator}. Put quotes around values that contain it, or name the missing column. If the separator"
                f" is another one, {HOW_TO_SET[0].lower()}{HOW_TO_SET[1:]}."
            )
    return [row + [""] * (num_columns - len(row)) for row in rows]


def column_names(path: Path, line: int, header: Sequence[str]) -> list[str]:
    """The names of the columns. A column without a name, such as the index of pandas, is `Unnamed: 0`."""
    names = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        if first.setdefault(name, place) != place:
            raise TableError(
                f"{path}, line {line}: the columns {first[name] + 1} and {place + 1} both have the name"
                f" {name!r}. Rename one of them in the header."
            )
    return names
