"""Rows encoded by `datasets.map`, without two things that take it longer than the tokenizer.

To know a cached result again, `datasets` pickles the tokenizer with its vocabulary word by word, for every data set
anew; here a tokenizer is hashed once for all clients, and its vocabulary in one piece. And lists of ids are searched
for dictionaries token by token before they are written, which arrays are not.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher


LARGE = 1000  # entries of a vocabulary, or of merges


def fingerprint(tokenizer: Any, *settings: Any) -> str | None:
    """
    What stands for a tokenizer and for other settings in the fingerprint of a data set encoded with them.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer. Truncation and padding of its last call do not matter.
        settings (`Any`): Whatever else decides how rows are encoded.

    Returns:
        `str`: A hash, the same in every process. `None` where there is no short way; `datasets` then finds its own.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks.mapping import fingerprint

    >>> one = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    >>> other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"b": 0}, unk_token="b")))
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
    (True, False)

    ```
    """
    try:
        light = copy.copy(tokenizer)
        for name, value in vars(tokenizer).items():
            if isinstance(value, dict) and len(value) > LARGE:  # word to number
                words = sorted(value, key=value.__getitem__)
                vars(light)[name] = json.dumps([words, [value[word] for word in words]])
            elif isinstance(value, list) and len(value) > LARGE:
                vars(light)[name] = json.dumps(value)
        return Hasher.hash((light, settings))
    except Exception:  # whatever pickling may raise; `datasets` warns of it
        return None


def with_arrays(encode: Callable[..., Mapping[str, Any]], columns: list[str]) -> Callable[..., dict[str, Any]]:
    """
    The same function, returning lists of whole numbers as arrays.

    Args:
        encode (`Callable`): Returns a batch of encoded rows.
        columns (`list[str]`): The columns that hold a list of ids for each row, if they are there.
    """

    def encode_as_arrays(*args: Any) -> dict[str, Any]:
        encoded = dict(encode(*args))
        for name in encoded.keys() & set(columns):
            encoded[name] = [np.array(row, dtype=np.int64) for row in encoded[name]]
        return encoded

    return encode_as_arrays


def map_rows(rows: Any, encode: Callable[..., Any], settings: str | None, **kwargs: Any) -> Any:
    """
    `rows.map` in batches, without the raw columns.

    Args:
        rows (`datasets.Dataset` or `datasets.IterableDataset`): Raw rows.
        encode (`Callable`): Of a batch and the numbers of its rows.
        settings (`str`, *optional*): What decides the result beside the rows: a [`fingerprint`].
        kwargs (*optional*): Passed on to `map`.
    """
    if settings is not None and isinstance(rows, Dataset):
        kwargs.setdefault("new_fingerprint", Hasher.hash((rows._fingerprint, settings)))
    columns = list(rows.column_names)
    return rows.map(encode, batched=True, with_indices=True, remove_columns=columns, **kwargs)
