"""Read a file as a table: the reader for each suffix."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .byte_stream import open_bytes
from .delimited import read_delimited
from .encodings import find_encoding
from .json_rows import read_json
from .table import BATCH_ROWS, Batch, Table, TableError
from .text_format import TableOptions, TextFormat
from .workbook import read_workbook


# The suffixes of table files, each with the name of its reader in `datasets`, which cannot read Excel.
TABLE_SUFFIXES = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".xlsx": "xlsx",
}


def data_suffix(path: Path) -> str | None:
    """The suffix that defines the data format, such as `.jsonl` in `rows.jsonl.gz`, or `None` if there is none."""
    return next((suffix.lower() for suffix in reversed(path.suffixes) if suffix.lower() in TABLE_SUFFIXES), None)


def read_table(path: str | Path, options: TableOptions | None = None) -> Table:
    """
    Read the format and the columns of a file. [`~Table.batches`] reads its rows.

    Args:
        path (`str` or `Path`): A CSV, JSON, Parquet, Excel or text file, which may be compressed.
        options ([`TableOptions`], *optional*): What is known about CSV files.

    Raises:
        TableError: If the format of the file is unknown or ambiguous, or the file has no rows.
    """
    path, options = Path(path), options or TableOptions()
    suffix = data_suffix(path)
    if path.suffix.lower() in (".xls", ".ods", ".xlsb"):
        raise TableError(f"{path} is a {path.suffix} file. Save it as .xlsx or as CSV UTF-8 in a spreadsheet program.")
    if suffix is None:
        kind = f"a {path.suffix} file" if path.suffix else "a file without a suffix"
        raise TableError(f"{path} is {kind}. Allowed formats are {', '.join(TABLE_SUFFIXES)}.")
    if suffix in (".csv", ".tsv"):
        return read_delimited(path, options, "\t" if suffix == ".tsv" else ",")
    if suffix == ".xlsx":
        return read_workbook(path, options)
    if suffix in (".json", ".jsonl"):
        return read_json(path, options)
    if suffix == ".txt":
        text_format = TextFormat(find_encoding(path, options.encoding))
        return Table(path, "text", ["text"], lambda as_text: _text_batches(path, text_format.encoding), text_format)
    return _read_parquet(path)


def table_notes(table: Table, is_read: bool = False) -> list[str]:
    """
    Sentences about what a reader may not expect: another format than UTF-8 with commas, and unusual numbers.

    Args:
        table ([`Table`]): The table.
        is_read (`bool`, *optional*, defaults to `False`): Whether its rows were read, so that the notes are complete.
            Otherwise the first batch is read.
    """
    if table.kind in ("CSV", "Excel") and not is_read:
        next(table.batches(), None)  # complete the notes
    expected = "\t" if data_suffix(table.path) == ".tsv" else ","
    is_expected = table.format is None or table.format.is_expected(expected, allows_mark=table.kind != "text")
    return [*([] if is_expected else [f"Read with {table.format}."]), *table.notes]


def _text_batches(path: Path, encoding: str) -> Iterator[Batch]:
    line = 1
    with io.TextIOWrapper(open_bytes(path), encoding=encoding) as file:
        while texts := [text.rstrip("\n") for text in islice(file, BATCH_ROWS)]:
            yield np.arange(line, line + len(texts)), pa.RecordBatch.from_pydict({"text": texts})
            line += len(texts)


def _read_parquet(path: Path) -> Table:
    try:
        columns = pq.read_schema(path).names
    except (pa.ArrowInvalid, OSError) as error:
        raise TableError(
            f"{path} is no valid Parquet file: {' '.join(str(error).split())}. Write it again."
        ) from error

    def batches(as_text: bool) -> Iterator[Batch]:
        row = 1
        for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS):
            yield np.arange(row, row + len(batch)), batch
            row += len(batch)

    return Table(path, "Parquet", columns, batches)
