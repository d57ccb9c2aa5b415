"""Tables in files: CSV as offices export it, JSON, Parquet, text and Excel workbooks, read as a stream of batches."""

from .encodings import find_encoding
from .table import EmptyTableError, Table, TableError
from .table_dataset import load_tables
from .table_files import TABLE_SUFFIXES, data_suffix, read_table, table_notes
from .text_format import TableOptions, TextFormat


__all__ = [
    "TABLE_SUFFIXES",
    "EmptyTableError",
    "Table",
    "TableError",
    "TableOptions",
    "TextFormat",
    "data_suffix",
    "find_encoding",
    "load_tables",
    "read_table",
    "table_notes",
]
