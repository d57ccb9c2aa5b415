"""Read one column of a dataset in Arrow, without copying rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from datasets import Dataset

from .._compat import indices_table
from ..utils.errors import IncompleteRowError


def group_by_value(dataset: Dataset, column: str) -> tuple[list[str], np.ndarray]:
    """
    Group the rows of a dataset by the value of a column.

    Args:
        dataset (`datasets.Dataset`):
            The rows. Earlier calls of `select`, `shuffle`, `filter` and `sort` are respected.
        column (`str`):
            A column of strings, integers, booleans or dates.

    Returns:
        `tuple[list[str], np.ndarray]`: `str(value)` of each distinct value, sorted by value, and for each row the
        position of its value in this list.

    Raises:
        `ValueError`: If the column does not exist, or if the value of a row is missing or an empty string.
        `TypeError`: If the column type cannot name clients.
    """
    check_columns(dataset.column_names, [column])
    values, rows = read_column(dataset, column)
    if not is_categorical(values.type):
        raise TypeError(
            f"The column {column!r} has the type {values.type}, whose values do not name clients. Use a column of"
            " strings, integers, booleans or dates, or cast the column:"
            f' dataset.cast_column({column!r}, Value("string")).'
        )
    codes, names = rank_values(values, rows)
    if len(codes) and int(codes.min()) < 0:
        raise IncompleteRowError(
            f"Row {int(codes.argmin())} has no value in the column {column!r}, so it belongs to no client. Drop rows"
            f" without a value: dataset.filter(lambda row: row[{column!r}] is not None)."
        )
    if names and names[0] == "":
        raise IncompleteRowError(
            f"Row {int((codes == 0).argmax())} has an empty string in the column {column!r}, which cannot name a"
            " client. Give the row a name, or drop the row."
        )
    return [str(name) for name in names], codes


def read_column(dataset: Dataset, column: str) -> tuple[pa.ChunkedArray, np.ndarray | None]:
    """
    Return the stored values of a column, and the position of each row in them.

    Returns:
        `tuple[pa.ChunkedArray, np.ndarray | None]`: The values, and for each row of the dataset the position of its
        value. The positions are `None` if row `i` has value `i`.
    """
    values: pa.ChunkedArray = dataset.data.column(column)
    # The table holds the rows before any `select`, `shuffle` or `filter`. `datasets` keeps the selection in a private
    # attribute; its public API reads the selection row by row, which takes seconds for a million rows.
    if (indices := indices_table(dataset)) is None:
        return values, None
    rows = indices.column(0).to_numpy().astype(np.int64, copy=False)
    if 4 * len(rows) < len(values):  # a small selection: copying its values is cheaper than reading all values
        return values.take(pa.array(rows)), None
    return values, rows


def rank_values(values: pa.ChunkedArray, rows: np.ndarray | None = None) -> tuple[np.ndarray, list]:
    """
    Map each value to its rank among the distinct values.

    Args:
        values (`pa.ChunkedArray`): Strings, integers, booleans or dates.
        rows (`np.ndarray`, *optional*): Positions of the values to use, as returned by [`read_column`].

    Returns:
        `tuple[np.ndarray, list]`: For each row the rank of its value (`int64`, `-1` for null), and the distinct
        values, sorted.
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
    rank_of_code = np.full(len(distinct) + 1, -1, dtype=np.int64)  # the last element is for code -1, null
    rank_of_code[ranked] = np.arange(len(ranked))
    return rank_of_code[codes], [distinct[code] for code in ranked]


def is_categorical(arrow_type: pa.DataType) -> bool:
    """Return whether values of an Arrow type can name a client or a class: strings, integers, booleans and dates."""
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_integer(arrow_type)
        or pa.types.is_boolean(arrow_type)
        or pa.types.is_date(arrow_type)
        or pa.types.is_null(arrow_type)  # a column of nulls only: a later error names the row
    )


def check_columns(column_names: list[str], required: list[str]) -> None:
    """Raise `ValueError` with the existing columns if a required column does not exist."""
    for column in required:
        if column not in column_names:
            raise ValueError(f"There is no column {column!r}. The columns are: {', '.join(column_names)}.")
