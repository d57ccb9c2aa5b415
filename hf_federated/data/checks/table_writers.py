"""Write a table to a CSV, JSON, Parquet or text file, one batch at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq


# The suffix of a written file by the format of the file that was read. Other formats are written as CSV.
SUFFIXES = {"CSV": ".csv", "JSON": ".jsonl", "Parquet": ".parquet", "text": ".txt"}


class TableWriter:
    """
    Writer of one file. The suffix of the path determines the format.

    Args:
        path (`Path`): The file, which is replaced.
        schema (`pyarrow.Schema`): The columns.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        self.schema = schema
        self._writer: Any = None
        self._file: Any = None
        if path.suffix == ".parquet":
            self._writer = pq.ParquetWriter(path, schema)
        elif path.suffix == ".csv":
            self._writer = pyarrow.csv.CSVWriter(path, schema)
        else:
            self._file = path.open("w", encoding="utf-8", newline="\n")
            self._is_json = path.suffix == ".jsonl"

    def write(self, rows: pa.RecordBatch | pa.Table) -> None:
        """
        Write a batch, with the columns in the order of the file.

        Raises:
            ValueError: If the batch has other columns than the file.
        """
        if sorted(rows.schema.names) == sorted(self.schema.names):
            rows = rows.select(self.schema.names)
        else:
            raise ValueError(
                f"two files of one site have the columns {', '.join(self.schema.names)} and"
                f" {', '.join(rows.schema.names)}. Write them with the same columns."
            )
        self.num_rows += len(rows)
        if self._writer is not None:
            self._writer.write(rows.cast(self.schema))
        elif self._is_json:
            self._file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows.to_pylist())
        else:
            self._file.writelines(f"{text}\n" for text in rows.column(0).to_pylist())

    def close(self) -> None:
        """Complete the file."""
        (self._writer or self._file).close()
