"""Reading one column of a data set as class labels, in Arrow: what label partitioners and statistics count.

A row has one label. Where the column holds a sequence of tags, the label is the row's most frequent entity type.
Labels of several columns, and several labels a row, are not handled here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, LargeList, List, Value

from .column_values import check_columns, is_categorical, rank_values, read_column


OUTSIDE = "O"
IGNORED = -100  # what a loss skips; tokenised tags have it at sub-words and special tokens
_POSITION_PREFIX = re.compile("[BILMESU]-(?=.)")  # of the IOB2, IOBES and BILOU schemes
_MOST_COUNTS = 2**21  # in one table of rows x types, which bounds the memory


def read_labels(dataset: Dataset, column: str) -> tuple[np.ndarray, list[str]]:
    """
    Takes the values of a column as class labels.

    - `ClassLabel`: the names in their order, also those that do not occur.
    - Strings, whole numbers, truth values, dates: the values that occur, sorted by value.
    - Sequences of any of those (tags): the *entity type* that most tokens of the row have. The types are
      the tags without their position prefix (`B-PER` and `I-PER` are `PER`; schemes IOB2, IOBES, BILOU). `O` and
      -100 do not count; a row of nothing else, or an empty row, has the label `O`. Of types that are equally
      frequent the one that comes first in the row wins. Whole numbers without names have no prefixes, and none of
      them means `O`. Types are in the order of the `ClassLabel`'s names, or else sorted by value.

    Args:
        dataset (`datasets.Dataset`):
            The rows. What `select`, `shuffle`, `filter` or `sort` did to them is honoured.
        column (`str`):
            The column with the labels.

    Returns:
        `tuple[np.ndarray, list[str]]`: For each row the position of its label in the list of names (shape
        `(num_rows,)`, `int64`), and the names.

    Raises:
        `ValueError`: If the column does not exist, or if a row has no label: null, or -1 in a `ClassLabel`; if a tag
            has none.
        `TypeError`: If the type of the column does not name classes (floats, dictionaries).

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
        _check_known(codes, len(names), column)
    else:
        _check_type(values.type, column)
        codes, ranked = rank_values(values, rows)
        names = [str(value) for value in ranked]
    if len(codes) and int(codes.min()) < 0:
        _raise_without_label(int(codes.argmin()), column)
    return codes, names


def read_labels_of_splits(splits: Mapping[str, Dataset], column: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """
    [`read_labels`] of several splits, with the same number for the same name.

    Returns:
        `tuple[dict[str, np.ndarray], list[str]]`: Labels of each split, and the names: first those of the first split,
        then those that only later ones have.
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
    """Names are matched with names and numbers with numbers; the number of a label is not its name."""
    named = [split for split, feature in features.items() if isinstance(feature, ClassLabel)]
    numbered = [
        split
        for split, feature in features.items()
        if isinstance(feature, Value) and feature.dtype.startswith(("int", "uint"))
    ]
    if named and numbered:
        raise ValueError(
            f"The column {column!r} has names in the split {named[0]!r} and numbers in {numbered[0]!r}, so labels"
            " cannot be matched. Cast the numbers to the same ClassLabel with cast_column."
        )


def _class_codes(values: pa.ChunkedArray) -> np.ndarray:
    """The numbers of a `ClassLabel`, with -1 for null: it means "no label" there already."""
    chunks = [chunk.fill_null(-1).to_numpy(zero_copy_only=False) for chunk in values.chunks]
    return np.concatenate([np.empty(0, dtype=np.int64), *chunks]).astype(np.int64, copy=False)


def _read_tags(values: pa.ChunkedArray, feature: object, column: str) -> tuple[np.ndarray, list[str]]:
    """The label of each row of tags, with -1 for rows that are null."""
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
            f"Row {int(row_of_tag[wrong[0]])} has a tag without a value, or none of the {len(tag_names)} that the"
            f" column {column!r} names. Correct it, or drop the row."
        )

    types = [_POSITION_PREFIX.sub("", name, count=1) for name in tag_names]
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
        occurring |= np.isin(names, types)  # its own names stay, whether they occur or not
    position = np.append(np.cumsum(occurring) - 1, -1)
    return position[labels], [name for name, occurs in zip(names, occurring, strict=True) if occurs]


def _most_frequent(rows: np.ndarray, types: np.ndarray, num_types: int, labels: np.ndarray) -> None:
    """Writes the most frequent type of each row that has any into `labels`; of equals, the first in the row."""
    rows_at_once = max(1, _MOST_COUNTS // num_types)
    for first_row in range(0, len(labels), rows_at_once):
        begin, end = np.searchsorted(rows, [first_row, first_row + rows_at_once])
        row, kind = rows[begin:end] - first_row, types[begin:end]
        cell = row * num_types + kind
        counts = np.bincount(cell, minlength=min(rows_at_once, len(labels) - first_row) * num_types)
        winners = np.flatnonzero(counts[cell] == counts.reshape(-1, num_types).max(axis=1)[row])
        # From the last to the first: where a row has several, the first is written last and stays.
        labels[first_row + row[winners[::-1]]] = kind[winners[::-1]]


def _check_known(codes: np.ndarray, num_names: int, column: str) -> None:
    if len(codes) and int(codes.max()) >= num_names:
        raise ValueError(
            f"Row {int(codes.argmax())} has the label {int(codes.max())}, but the column {column!r} names"
            f" {num_names} classes (0 to {num_names - 1}). Correct it, or cast the column with all names."
        )


def _check_type(arrow_type: pa.DataType, column: str, prefix: str = "") -> None:
    if not is_categorical(arrow_type):
        raise TypeError(
            f"The column {column!r} has the type {prefix}{arrow_type}, whose values are no class labels. Use a column"
            " of ClassLabel, strings, whole numbers, truth values, dates, or sequences of tags; turn amounts into"
            f' classes first: dataset.map(lambda row: {{"class": int(row[{column!r}] > 0.5)}}).'
        )


def _raise_without_label(row: int, column: str) -> None:
    raise ValueError(
        f"Row {row} has no label in the column {column!r} (null, or -1 in a ClassLabel). Drop such rows first:"
        f" dataset.filter(lambda row: row[{column!r}] is not None and row[{column!r}] != -1)."
    )
