"""Reading one column of a data set as client ids, in Arrow, without copying rows."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from datasets import Dataset


def owners_by_value(dataset: Dataset, column: str) -> tuple[list[str], np.ndarray]:
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
    values: pa.ChunkedArray = dataset.data.column(column)
    _check_type(values.type, column)
    encoded = values.dictionary_encode().unify_dictionaries()
    if encoded.num_chunks == 0:
        return [], np.empty(0, dtype=np.int64)
    codes = np.concatenate([chunk.indices.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in encoded.chunks])
    names: list = encoded.chunk(0).dictionary.to_pylist()
    # The table holds the rows before any select, shuffle or filter. Datasets keeps those as a mapping that is private;
    # its public reader gathers row by row, which takes seconds for a million rows.
    if dataset._indices is not None:
        codes = codes[dataset._indices.column(0).to_numpy()]
    if len(codes) and int(codes.min()) < 0:
        raise ValueError(
            f"Row {int(codes.argmin())} has no value in the column {column!r}, so it belongs to no client. Drop such"
            f" rows first: dataset.filter(lambda row: row[{column!r}] is not None)."
        )
    occurring = np.flatnonzero(np.bincount(codes, minlength=len(names)))
    ranked = sorted(occurring.tolist(), key=lambda code: names[code])
    if ranked and names[ranked[0]] == "":
        raise ValueError(
            f"Row {int((codes == ranked[0]).argmax())} has the empty string in the column {column!r}, which names no"
            " client. Give it a name or drop it."
        )
    rank_of_code = np.full(len(names), -1, dtype=np.int64)
    rank_of_code[ranked] = np.arange(len(ranked))
    return [str(names[code]) for code in ranked], rank_of_code[codes]


def check_columns(column_names: list[str], wanted: list[str]) -> None:
    """Raises `ValueError` with the columns there are, if one of those wanted does not exist."""
    for column in wanted:
        if column not in column_names:
            raise ValueError(f"There is no column {column!r}. The columns are: {', '.join(column_names)}.")


def _check_type(arrow_type: pa.DataType, column: str) -> None:
    names_things = (
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_integer(arrow_type)
        or pa.types.is_boolean(arrow_type)
        or pa.types.is_date(arrow_type)
        or pa.types.is_null(arrow_type)  # a column of nothing but nulls: the error names the row
    )
    if not names_things:
        raise TypeError(
            f"The column {column!r} has the type {arrow_type}, whose values do not name clients. Use a column of"
            " strings, whole numbers, truth values or dates, or cast it:"
            f' dataset.cast_column({column!r}, Value("string")).'
        )
