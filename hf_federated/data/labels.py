"""Read one column of a dataset as class labels, in Arrow, for label partitioners and statistics.

Each row has one label. If the column holds sequences of tags, the label is the most frequent entity type of the row.
Labels from several columns and several labels per row are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, LargeList, List, Value

from ..utils.errors import IncompleteRowError
from .column_values import check_columns, is_categorical, rank_values, read_column


OUTSIDE = "O"
# The loss ignores this label. Tokenized tags have it at sub-words and special tokens.
IGNORED = -100
# The position prefixes of the schemes IOB2, IOBES and BILOU.
POSITION_PREFIX = re.compile("[BILMESU]-(?=.)")
# Maximum number of counts in one table of rows and types, which limits the memory.
_MOST_COUNTS = 2**21


def read_labels(dataset: Dataset, column: str) -> tuple[np.ndarray, list[str]]:
    """
    Read the values of a column as class labels.

    - `ClassLabel`: the names in their order, including names that do not occur.
    - Strings, integers, booleans and dates: the values that occur, sorted by value.
    - Sequences of these types (tags): the *entity type* of most tokens in the row. The types are the tags without
      their position prefix (`B-PER` and `I-PER` are `PER`; schemes IOB2, IOBES, BILOU). `O` and -100 are not counted.
      A row without any other tag, or an empty row, has the label `O`. If several types are equally frequent, the type
      that comes first in the row is the label. Integers without names have no prefixes, and no integer means `O`. The
      types are in the order of the `ClassLabel` names, or otherwise sorted by value.

    Args:
        dataset (`datasets.Dataset`):
            The rows. Earlier calls of `select`, `shuffle`, `filter` and `sort` are respected.
        column (`str`):
            The column with the labels.

    Returns:
        `tuple[np.ndarray, list[str]]`: For each row the position of its label in the list of names (shape
        `(num_rows,)`, `int64`), and the names.

    Raises:
        `ValueError`: If the column does not exist, if a row has no label (null, or -1 in a `ClassLabel`), or if a tag
            has no value.
        `TypeError`: If the column type cannot name classes (floats, dictionaries).

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from hf_federated.data.labels import read_labels
    >>> dataset = Dataset.from_dict({"tags": [["O", "B-LOC", "I-LOC", "B-PER"], ["O"], ["B-PER", "B-LOC"]]})
    >>> codes, names = read_labels(dataset, "tags")
    >>> [names[code] for code in codes]
    ['LOC', 'O', 'PER']

    ```
    """
    check_columns(dataset.column_names, [column])
    feature = dataset.features[column]
    values, rows = read_column(dataset, column)
    if isinstance(feature, (List, LargeList)):
        values = values if rows is None else values.take(pa.array(rows))
        codes, names = _read_tags(values, feature.feature, column)
    elif isinstance(feature, ClassLabel):
        codes, names = _class_codes(values), list(feature.names)
        codes = codes if rows is None else codes[rows]
        if len(codes) and int(codes.max()) >= len(names):
            raise ValueError(
                f"Row {int(codes.argmax())} has the label {int(codes.max())}, but the column {column!r} names"
                f" {len(names)} classes (0 to {len(names) - 1}). Correct the label, or cast the column to a ClassLabel"
                " with all names."
            )
    else:
        _check_type(values.type, column)
        codes, ranked = rank_values(values, rows)
        names = [str(value) for value in ranked]
    if len(codes) and int(codes.min()) < 0:
        raise IncompleteRowError(
            f"Row {int(codes.argmin())} has no label in the column {column!r} (null, or -1 in a ClassLabel). Drop rows"
            f" without a label: dataset.filter(lambda row: row[{column!r}] is not None and row[{column!r}] != -1)."
        )
    return codes, names


def read_labels_of_splits(splits: Mapping[str, Dataset], column: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """
    Apply [`read_labels`] to several splits, with the same number for the same name in all splits.

    Returns:
        `tuple[dict[str, np.ndarray], list[str]]`: The labels of each split, and the names: first the names of the
        first split, then the names that occur only in later splits.
    """
    position_of: dict[str, int] = {}
    labels = {}
    for split, dataset in splits.items():
        codes, names = read_labels(dataset, column)
        positions = [position_of.setdefault(name, len(position_of)) for name in names]
        labels[split] = np.array(positions, dtype=np.int64)[codes]
    _check_comparable({split: dataset.features[column] for split, dataset in splits.items()}, column)
    return labels, list(position_of)


def _check_comparable(features: Mapping[str, Any], column: str) -> None:
    """
    Raise `ValueError` if one split has label names and another split has numbers.

    The number of a label is not its name, so names and numbers cannot be matched.
    """
    named = [split for split, feature in features.items() if isinstance(feature, ClassLabel)]
    numbered = [
        split
        for split, feature in features.items()
        if isinstance(feature, Value) and feature.dtype.startswith(("int", "uint"))
    ]
    if named and numbered:
        raise ValueError(
            f"The column {column!r} has label names in the split {named[0]!r} and numbers in {numbered[0]!r}, so"
            " labels cannot be matched. Cast the numbers to the same ClassLabel with cast_column."
        )


def _class_codes(values: pa.ChunkedArray) -> np.ndarray:
    """Return the numbers of a `ClassLabel`, with -1 for null. A `ClassLabel` already uses -1 for a missing label."""
    chunks = [chunk.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in values.chunks]
    return np.concatenate([np.empty(0, dtype=np.int64), *chunks]).astype(np.int64, copy=False)


def _read_tags(values: pa.ChunkedArray, feature: object, column: str) -> tuple[np.ndarray, list[str]]:
    """Return the label of each row of tags, with -1 for null rows."""
    _check_type(values.type.value_type, column, "a sequence of ")
    tags = pa.chunked_array([chunk.flatten() for chunk in values.chunks], type=values.type.value_type)
    lengths = [pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False) for chunk in values.chunks]
    row_of_tag = np.repeat(np.arange(len(values)), np.concatenate([np.empty(0, dtype=np.int64), *lengths]))
    if isinstance(feature, ClassLabel):
        codes, tag_names = _class_codes(tags), list(feature.names)
        ignored = codes == IGNORED
    else:
        codes, ranked = rank_values(tags)
        tag_names = [str(value) for value in ranked]
        ignored = codes == ranked.index(IGNORED) if IGNORED in ranked else np.zeros(len(codes), dtype=bool)
    wrong = np.flatnonzero(((codes < 0) | (codes >= len(tag_names))) & ~ignored)
    if len(wrong):
        raise ValueError(
            f"Row {int(row_of_tag[wrong[0]])} has a tag without a value, or a tag that is not one of the"
            f" {len(tag_names)} tags of the column {column!r}. Correct the tag, or drop the row."
        )

    types = [POSITION_PREFIX.sub("", name, count=1) for name in tag_names]
    names = list(dict.fromkeys([*types, OUTSIDE]))
    if tags.type in (pa.string(), pa.large_string()):
        names.sort()
    type_of_tag = np.array([names.index(name) for name in types] + [names.index(OUTSIDE)], dtype=np.int64)
    type_codes = type_of_tag[np.where(ignored, -1, codes)]
    counted = type_codes != names.index(OUTSIDE)
    labels = np.full(len(values), names.index(OUTSIDE), dtype=np.int64)
    _most_frequent(row_of_tag[counted], type_codes[counted], len(names), labels)
    labels[values.is_null().to_numpy()] = -1

    occurring = np.bincount(labels + 1, minlength=len(names) + 1)[1:] > 0
    if isinstance(feature, ClassLabel):
        occurring |= np.isin(names, types)  # all names of the `ClassLabel` are kept
    position = np.append(np.cumsum(occurring) - 1, -1)
    return position[labels], [name for name, occurs in zip(names, occurring, strict=True) if occurs]


def _most_frequent(rows: np.ndarray, types: np.ndarray, num_types: int, labels: np.ndarray) -> None:
    """Write the most frequent type of each row that has types into `labels`. The first type in the row wins a tie."""
    rows_at_once = max(1, _MOST_COUNTS // num_types)
    for first_row in range(0, len(labels), rows_at_once):
        begin, end = np.searchsorted(rows, [first_row, first_row + rows_at_once])
        row, kind = rows[begin:end] - first_row, types[begin:end]
        cell = row * num_types + kind
        counts = np.bincount(cell, minlength=min(rows_at_once, len(labels) - first_row) * num_types)
        winners = np.flatnonzero(counts[cell] == counts.reshape(-1, num_types).max(axis=1)[row])
        # The order is reversed: if a row has several winners, the first winner is written last.
        labels[first_row + row[winners[::-1]]] = kind[winners[::-1]]


def _check_type(arrow_type: pa.DataType, column: str, prefix: str = "") -> None:
    if not is_categorical(arrow_type):
        raise TypeError(
            f"The column {column!r} has the type {prefix}{arrow_type}, whose values are no class labels. Use a column"
            " of ClassLabel, strings, integers, booleans, dates, or sequences of tags. Convert quantities to"
            f' classes first: dataset.map(lambda row: {{"class": int(row[{column!r}] > 0.5)}}).'
        )
