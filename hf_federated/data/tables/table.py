"""A table in a file, whose rows are read in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from .text_format import TextFormat


# The line of the file at which each row starts, and the rows.
Batch: TypeAlias = "tuple[np.ndarray, pa.RecordBatch]"
# Rows of a batch. `datasets` infers the types of a CSV file from as many rows.
BATCH_ROWS = 10_000


class TableError(ValueError):
    """A file that cannot be read as a table. The message names the file, the line and the correction."""


class EmptyTableError(TableError):
    """A file without rows."""


@dataclass(frozen=True)
class Table:
    r"""
    A table in a file.

    Args:
        path (`Path`): The file.
        kind (`str`): The format of the file, such as `"CSV"` or `"Parquet"`.
        columns (`list[str]`): The names of the columns. For JSON, the names in the first 10,000 rows.
        read (`Callable`): Reads the batches. Its argument is `as_text` of [`~Table.batches`].
        format (`TextFormat`, *optional*): The separator and the encoding that are used. `None` for Parquet and Excel.
        notes (`list[str]`): Sentences about values that a reader may not expect. Complete after the last batch.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> from hf_federated.data.tables import read_table

    >>> path = Path(tempfile.mkdtemp()) / "north.csv"
    >>> _ = path.write_bytes("text;label\n\"zu heiß,\nzu laut\";defect\nschön;fine\n".encode("cp1252"))
    >>> table = read_table(path)
    >>> table.columns, str(table.format)
    (['text', 'label'], "separator ';', encoding cp1252")
    >>> for lines, batch in table.batches():
    ...     print(lines.tolist(), batch.column("label").to_pylist())
    [2, 4] ['defect', 'fine']

    ```
    """

    path: Path
    kind: str
    columns: list[str]
    read: Callable[[bool], Iterator[Batch]] = field(repr=False)
    format: TextFormat | None = None
    notes: list[str] = field(default_factory=list)

    def batches(self, as_text: bool = False) -> Iterator[Batch]:
        """
        Read the rows, up to 10,000 at a time.

        Args:
            as_text (`bool`, *optional*, defaults to `False`): Whether all columns of a CSV file or of a workbook are
                text, which is faster. By default numbers and booleans have their types, which the first batch
                determines for all batches. Missing values are null in both cases.

        Returns:
            `Iterator[tuple[numpy.ndarray, pyarrow.RecordBatch]]`: The line of the file at which each row starts,
            counted from 1, and the rows. A workbook and a Parquet file have row numbers in place of lines.

        Raises:
            TableError: If a row cannot be read.
        """
        return self.read(as_text)
