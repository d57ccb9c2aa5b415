"""Read the sheet of an Excel workbook."""

from __future__ import annotations

import datetime
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from hf_federated.utils.optional_packages import require_packages

from .delimited import column_names
from .table import BATCH_ROWS, EmptyTableError, Table, TableError
from .text_format import TableOptions
from .typed_rows import RowConverter, TextRows


def read_workbook(path: Path, options: TableOptions) -> Table:
    """
    Read the columns of the only sheet with values.

    The values have the types that the same values have in a CSV file, except for columns with texts such as `007` in
    the first 10,000 rows: these columns stay text. The row numbers of the sheet take the place of lines.

    Args:
        path (`Path`): The file.
        options ([`TableOptions`]): Only `text_columns` is used.

    Raises:
        TableError: If the file is no workbook, or no sheet or several sheets have values.
        ImportError: If openpyxl is not installed.
    """
    require_packages(f"Reading {path}", {"xlsx": {"openpyxl": "openpyxl"}})
    sheet = _sheet_with_values(path)
    rows = _cells(path, sheet)
    header = next(rows)
    columns = column_names(path, header[0], [_text(value) for value in header[1]])
    texts = set(options.text_columns)
    first = [row for _, row in islice(rows, BATCH_ROWS)]
    if not first:
        raise EmptyTableError(
            f"{path}, row {header[0]}: the sheet {sheet!r} has names of columns, but no rows. Add rows."
        )
    for row in first:
        texts |= {name for name, value in zip(columns, row, strict=False) if isinstance(value, str) and value.strip()}
    converter = RowConverter(path, columns, sorted(texts))
    return Table(
        path,
        "Excel",
        columns,
        lambda as_text: converter.batches(lambda: _batches(path, sheet, columns), as_text),
        notes=converter.notes,
    )


def _sheet_with_values(path: Path) -> str:
    names = []
    for sheet in _open(path).worksheets:
        with _names_damage(f"{path}, sheet {sheet.title!r}"):
            if any(value is not None for row in sheet.iter_rows(values_only=True) for value in row):
                names.append(sheet.title)
    if len(names) != 1:
        found = f"the {len(names)} sheets {', '.join(names)} have values" if names else "no sheet has values"
        raise TableError(
            f"{path}: {found}, but a table is one sheet. Save the sheet with the table as its own workbook, or as a"
            " CSV file."
        )
    return str(names[0])


def _open(path: Path) -> Any:
    import openpyxl

    try:
        with _names_damage(str(path)):
            return openpyxl.load_workbook(path, read_only=True, data_only=True)
    except openpyxl.utils.exceptions.InvalidFileException as error:
        raise TableError(
            f"{path} is no Excel workbook ({error}). Open it in a spreadsheet program and save it as .xlsx or CSV."
        ) from error


@contextmanager
def _names_damage(place: str) -> Iterator[None]:
    """Raise a [`TableError`] about the errors that openpyxl raises for a damaged file."""
    try:
        yield
    # The errors of both XML parsers, of which openpyxl uses one, are syntax errors.
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, SyntaxError) as error:
        raise TableError(
            f"{place}: the file is damaged, or it is no Excel workbook ({error}). Copy it again, or open it in a"
            " spreadsheet program and save it as .xlsx or CSV."
        ) from error


def _cells(path: Path, sheet: str) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The number and the values of each row that has a value."""
    workbook = _open(path)
    rows = enumerate(workbook[sheet].iter_rows(values_only=True), start=1)
    number = 0
    while True:
        with _names_damage(f"{path}, row {number + 1}"):
            number, row = next(rows, (0, ()))
        if number == 0:
            break
        if any(value is not None for value in row):
            yield number, row
    workbook.close()


def _batches(path: Path, sheet: str, columns: list[str]) -> Iterator[TextRows]:
    numbers: list[int] = []
    rows: list[list[str]] = []
    cells = _cells(path, sheet)
    next(cells)
    for number, row in cells:
        values = [_text(value) for value in row]
        extra = next((value for value in values[len(columns) :] if value), None)
        if extra is not None:
            raise TableError(
                f"{path}, row {number}: the value {extra[:50]!r} is right of the last column {columns[-1]!r}. Name its"
                " column in the header, or remove the value."
            )
        numbers.append(number)
        rows.append((values + [""] * len(columns))[: len(columns)])
        if len(rows) == BATCH_ROWS:
            yield numbers, rows
            numbers, rows = [], []
    if rows:
        yield numbers, rows


def _text(value: Any) -> str:
    """The text of a cell in a CSV file."""
    if value is None:
        return ""
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)
