"""Reading one column of a data set in Arrow, without copying rows: its values as numbers, and as names of clients."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from datasets import Dataset


def group_by_value(dataset: Dataset, column: str) -> tuple[list[str], np.ndarray]:
    """
    Takes the values of a column as the names of clients.

    Args:
        dataset (`datasets.Dataset`):
            The rows. What `select`, `shuffle`, `filter` or `sort` did to them is honoured.
        column (`str`):
            A column of strings, whole numbers, truth values or dates.

    Returns:
        `tuple[list[str], np.ndarray]`: `str(value)` of each value that occurs, sorted by value, and for each row the
        position of its value in that list.

    Raises:
        `ValueError`: If the column does not exist, or if a row has no value or the empty string.
        `TypeError`: If the type of the column does not name things.
    """
    check_columns(dataset.column_names, [column])
    values, rows = read_column(dataset, column)
    if not is_categorical(values.type):
        raise TypeError(
            f"The column {column!r} has the type {values.type}, whose values do not name clients. Use a column of"
            " strings, whole numbers, truth values or dates, or cast it:"
            f' dataset.cast_column({column!r}, Value("string")).'
        )
    codes, names = rank_values(values, rows)
    if len(codes) and int(codes.min()) < 0:
        raise ValueError(
            f"Row {int(codes.argmin())} has no value in the column {column!r}, so it belongs to no client. Drop such"
            f" rows first: dataset.filter(lambda row: row[{column!r}] is not None)."
        )
    if names and names[0] == "":
        raise ValueError(
            f"Row {int((codes == 0).argmax())} has the empty string in the column {column!r}, which names no"
            " client. Give it a name or drop it."
        )
    return [str(name) for name in names], codes


def read_column(dataset: Dataset, column: str) -> tuple[pa.ChunkedArray, np.ndarray | None]:
    """
    The values of a column where they lie, and which of them are the rows of the data set.

    Returns:
        `tuple[pa.ChunkedArray, np.ndarray | None]`: Values, and for each row of the data set its position among them;
        `None` if the rows are the values as they stand.
    """
    values: pa.ChunkedArray = dataset.data.column(column)
    # The table holds the rows before any select, shuffle or filter. Datasets keeps those as a mapping that is private;
    # its public reader gathers row by row, which takes seconds for a million rows.
    if dataset._indices is None:
        return values, None
    rows = dataset._indices.column(0).to_numpy().astype(np.int64, copy=False)
    if 4 * len(rows) < len(values):  # a few rows of many: the others need not be looked at
        return values.take(pa.array(rows)), None
    return values, rows


def rank_values(values: pa.ChunkedArray, rows: np.ndarray | None = None) -> tuple[np.ndarray, list]:
    """
    Numbers values by their order.

    Args:
        values (`pa.ChunkedArray`): Strings, whole numbers, truth values or dates.
        rows (`np.ndarray`, *optional*): Positions of the values that count, as [`read_column`] returns them.

    Returns:
        `tuple[np.ndarray, list]`: For each row the rank of its value (`int64`, `-1` for null), and the values that
        occur, sorted.
    """
    encoded = values.dictionary_encode().unify_dictionaries()
    if encoded.num_chunks == 0:
        return np.empty(0, dtype=np.int64), []
    codes = np.concatenate([chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in encoded.chunks])
    distinct: list = encoded.chunk(0).dictionary.to_pylist()
    if rows is not None:
        codes = codes[rows]
    occurring = np.flatnonzero(np.bincount(codes + 1, minlength=len(distinct) + 1)[1:])
    ranked = sorted(occurring.tolist(), key=lambda code: distinct[code])
    rank_of_code = np.full(len(distinct) + 1, -1, dtype=np.int64)  # the last place is that of code -1, null
    rank_of_code[ranked] = np.arange(len(ranked))
    return rank_of_code[codes], [distinct[code] for code in ranked]


def is_categorical(arrow_type: pa.DataType) -> bool:
    """Whether values of this type can name a client or a class: equal values are equal, and there are few of them."""
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_integer(arrow_type)
        or pa.types.is_boolean(arrow_type)
        or pa.types.is_date(arrow_type)
        or pa.types.is_null(arrow_type)  # a column of nothing but nulls: the error names the row
    )


def check_columns(column_names: list[str], wanted: list[str]) -> None:
    """Raises `ValueError` with the columns there are, if one of those wanted does not exist."""
    for column in wanted:
        if column not in column_names:
            raise ValueError(f"There is no column {column!r}. The columns are: {', '.join(column_names)}.")
