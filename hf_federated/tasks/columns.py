"""Raw columns of examples: read and check texts, labels and label names, and report errors with row numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..utils.arguments import require
from ..utils.errors import IncompleteRowError


Batch = Mapping[str, Sequence[Any]]
# Number of label names in an error message.
MAX_LISTED_NAMES = 20


def label_maps(names: Sequence[str]) -> dict[str, Any]:
    """
    Return the label arguments of a model config.

    Args:
        names (`Sequence[str]`): Label names. The position of a name is its label ID.
    """
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def check_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """
    Validate label names and return them as a tuple.

    Args:
        argument (`str`): The name of the argument, for error messages.
        names (`Sequence[str]`): Label names. The position of a name is its label ID.

    Raises:
        ValueError: If there are no names, or if a name occurs twice.
        TypeError: If `names` is a single string or contains a value that is not a string.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`{argument}` is {names!r}; it must be a list of strings, one for each label, in ID order.")
    if len(names) == 0 or len(set(names)) < len(names):
        raise ValueError(f"`{argument}` is {list(names)!r}; it must contain at least one name and no duplicates.")
    return tuple(names)


def list_names(names: Sequence[str]) -> str:
    """List the first names and the range of their label IDs, for error messages."""
    more = f", … ({len(names)} names)" if len(names) > MAX_LISTED_NAMES else ""
    return f"{', '.join(map(repr, names[:MAX_LISTED_NAMES]))}{more}, or 0 to {len(names) - 1}"


def check_length(argument: str, length: int | None, minimum: int = 1) -> None:
    """
    Check that a number of tokens is in range.

    Args:
        argument (`str`): The name of the argument, for error messages.
        length (`int`, *optional*): The number of tokens. `None` passes the check.
        minimum (`int`, *optional*, defaults to `1`): The smallest allowed value.

    Raises:
        ValueError: If `length` is smaller than `minimum`.
    """
    require(argument, length, length is None or length >= minimum, f"at least {minimum}")


def row_name(position: int, indices: Sequence[int] | None) -> str:
    """
    Return the name of a row for error messages.

    Args:
        position (`int`): The position of the row in the batch.
        indices (`Sequence[int]`, *optional*): The row numbers of the batch.
    """
    return f"Row {position} of the batch" if indices is None else f"Row {indices[position]}"


def read_column(batch: Batch, column: str) -> Sequence[Any]:
    """
    Return a column of a batch.

    Args:
        batch (`Mapping[str, Sequence]`): Raw columns.
        column (`str`): The name of the column.

    Raises:
        ValueError: If the column does not exist. The message lists the existing columns.
    """
    if column not in batch:
        raise ValueError(
            f"There is no column {column!r}; the columns are {', '.join(map(repr, batch))}. Set the column name in the"
            " task. If the missing column holds labels, you can encode with `with_labels=False`."
        )
    return batch[column]


def is_blank(text: Any) -> bool:
    """Whether a value is not a string or contains only whitespace."""
    return not isinstance(text, str) or not text.strip()


def find_blank(batch: Batch, columns: Sequence[str]) -> list[bool]:
    """Find rows with a blank value in one of the columns. Raises `ValueError` if a column does not exist."""
    rows = zip(*(read_column(batch, column) for column in columns), strict=True)
    return [any(map(is_blank, texts)) for texts in rows]


def read_texts(batch: Batch, column: str, indices: Sequence[int] | None) -> list[str]:
    """
    Return a text column and check that no text is empty.

    Args:
        batch (`Mapping[str, Sequence]`): Raw columns.
        column (`str`): The name of the column.
        indices (`Sequence[int]`, *optional*): The row numbers of the batch.

    Raises:
        ValueError: If a text is missing, empty or only whitespace. The message contains the row number.
    """
    texts = list(read_column(batch, column))
    for position, text in enumerate(texts):
        if is_blank(text):
            found = "an empty text" if isinstance(text, str) else f"{text!r} instead of a text"
            raise IncompleteRowError(
                f"{row_name(position, indices)} has {found} in the column {column!r}. Drop such rows."
            )
    return texts


def read_labels(batch: Batch, column: str, names: Sequence[str], indices: Sequence[int] | None) -> list[int]:
    """
    Return the label IDs of a column with label IDs or label names.

    Args:
        batch (`Mapping[str, Sequence]`): Raw columns.
        column (`str`): The name of the column.
        names (`Sequence[str]`): Label names. The position of a name is its label ID.
        indices (`Sequence[int]`, *optional*): The row numbers of the batch.

    Raises:
        ValueError: If a label is missing or unknown. The message contains the row number.
    """
    number_of = {name: number for number, name in enumerate(names)}
    labels = []
    for position, value in enumerate(read_column(batch, column)):
        number = number_of.get(value, value) if isinstance(value, str) else value
        if number is None or number == -1:  # `ClassLabel` encodes a missing label as -1
            raise IncompleteRowError(
                f"{row_name(position, indices)} has no label in the column {column!r}. Drop such rows, or encode with"
                " `with_labels=False`."
            )
        if isinstance(number, str) or number not in range(len(names)):
            raise ValueError(
                f"{row_name(position, indices)} has the label {value!r} in the column {column!r}; allowed are"
                f" {list_names(names)}."
            )
        labels.append(int(number))
    return labels


def rows_by_id(ids: Sequence[str], feature_ids: Sequence[str]) -> dict[str, int]:
    """
    Map the ID of each raw example to its row number.

    Args:
        ids (`Sequence[str]`): The IDs of the raw examples.
        feature_ids (`Sequence[str]`): The IDs of the encoded examples.

    Raises:
        ValueError: If two raw examples have the same ID, or if raw and encoded examples have different IDs.
    """
    row_of = {value: row for row, value in enumerate(ids)}
    if len(row_of) < len(ids):
        repeated = next(row for row, value in enumerate(ids) if row_of[value] != row)
        raise ValueError(f"Row {repeated} has the same id {ids[repeated]!r} as another row of `rows`. Use unique ids.")
    if set(feature_ids) != set(row_of):
        raise ValueError("`features` and `rows` have different IDs. Encode `rows` to create matching features.")
    return row_of
