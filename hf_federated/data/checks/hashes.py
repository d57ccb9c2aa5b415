"""64-bit hashes of texts and labels, computed for a whole column at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pandas.util import hash_array

from ..column_values import is_categorical
from .site_table import is_list, is_string


# An odd number, so that its powers modulo 2**64 do not become zero.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def column_hashes(values: pa.Array) -> np.ndarray:
    """
    The hash of each value of a column. Equal texts have equal hashes, also with other whitespace around them.

    Args:
        values (`pyarrow.Array`): Strings, numbers, dates, or lists of these.

    Returns:
        `np.ndarray` of shape `(num_values,)`, `uint64`: The hashes.
    """
    if is_list(values.type):
        return _list_hashes(values)
    if is_string(values.type):
        texts = pc.utf8_trim_whitespace(values).fill_null("").to_numpy(zero_copy_only=False)
        return hash_array(texts, categorize=False)
    if is_categorical(values.type) or pa.types.is_floating(values.type):
        texts = pc.cast(values, pa.string()).fill_null("").to_numpy(zero_copy_only=False)
    else:
        texts = np.array([repr(value) for value in values.to_pylist()], dtype=object)
    return hash_array(texts, categorize=False)


def row_hashes(columns: list[pa.Array]) -> np.ndarray:
    """The hash of each row of several columns, which depends on the order of the columns."""
    result = np.zeros(len(columns[0]), dtype=np.uint64)
    for values in columns:
        result = result * _FACTOR + column_hashes(values)
    return result


def _list_hashes(values: pa.Array) -> np.ndarray:
    lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    items = column_hashes(values.flatten())
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(items)) - np.repeat(starts, lengths)
    powers = np.cumprod(np.full(int(lengths.max(initial=0)) + 1, _FACTOR, dtype=np.uint64))
    # The length is a part of the hash, so that an empty word at the end of a list changes the hash.
    result = lengths.astype(np.uint64) * _FACTOR
    filled = np.flatnonzero(lengths)
    if len(filled):
        result[filled] += np.add.reduceat(items * powers[positions], starts[filled])
    return result
