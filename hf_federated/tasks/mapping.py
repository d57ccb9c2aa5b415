"""Encode datasets with `datasets.map`, with faster fingerprints and faster writing.

To recognize a cached result, `datasets` pickles the tokenizer for every dataset, and its vocabulary entry by entry.
This module hashes the tokenizer once for all clients and serializes the vocabulary in one piece. It also returns
token IDs as arrays, because `datasets` searches lists of IDs for dictionaries, token by token, before it writes them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerFast

from .._compat import dataset_fingerprint
from .text_encoder import TextEncoder


LARGE = 1000  # number of entries above which a vocabulary or a list of merges is serialized in one piece


def fingerprint(tokenizer: Any, *settings: Any) -> str | None:
    """
    Hash a tokenizer and other settings for the fingerprint of an encoded dataset.

    Args:
        tokenizer (`PreTrainedTokenizerBase` or [`TextEncoder`]): The tokenizer. The hash does not depend on the
            truncation and padding of its last call.
        settings (`Any`): Other settings that determine how examples are encoded.

    Returns:
        `str`: A hash that is the same in every process. `None` if the settings cannot be pickled. In that case,
            `datasets` computes its own fingerprint.

    Example:

    ```python
    >>> from tokenizers import Tokenizer
    >>> from tokenizers.models import WordLevel
    >>> from transformers import PreTrainedTokenizerFast
    >>> from hf_federated.tasks.mapping import fingerprint

    >>> first = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    >>> second = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"b": 0}, unk_token="b")))
    >>> fingerprint(first) == fingerprint(first), fingerprint(first) == fingerprint(second)
    (True, False)

    ```
    """
    try:
        if isinstance(tokenizer, TextEncoder):
            return Hasher.hash((tokenizer.digest, settings))
        light = copy.copy(tokenizer)
        for name, value in vars(tokenizer).items():
            if isinstance(value, dict) and len(value) > LARGE:  # vocabulary: word to ID
                words = sorted(value, key=value.__getitem__)
                vars(light)[name] = json.dumps([words, [value[word] for word in words]])
            elif isinstance(value, list) and len(value) > LARGE:
                vars(light)[name] = json.dumps(value)
        with _no_truncation_and_padding(tokenizer):
            return Hasher.hash((light, settings))
    except Exception:  # pickling can raise any exception; `datasets` then logs a warning
        return None


@contextmanager
def _no_truncation_and_padding(tokenizer: Any) -> Iterator[None]:
    """Hide the truncation and padding of the tokenizer's last call. `datasets` does the same from version 4.7."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        yield
        return
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def map_rows(rows: Any, encode: Callable[..., Any], tokenizer: Any, settings: str | None, **kwargs: Any) -> Any:
    """
    Apply `rows.map` in batches and remove the raw columns.

    Args:
        rows (`datasets.Dataset` or `datasets.IterableDataset`): Raw examples.
        encode (`Callable`): A function that takes a batch and its row numbers.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer. Its token ID columns are written as arrays, except in an
            `IterableDataset`, whose examples collators receive unchanged.
        settings (`str`, *optional*): A [`fingerprint`] of the settings that determine the result, in addition to the
            examples.
        kwargs (*optional*): Further arguments of `map`.
    """
    if settings is not None and isinstance(rows, Dataset):
        kwargs.setdefault("new_fingerprint", Hasher.hash((dataset_fingerprint(rows), settings)))
    token_columns = set(tokenizer.model_input_names)

    def encode_as_arrays(*args: Any) -> dict[str, Any]:
        encoded = dict(encode(*args))
        for name in encoded.keys() & token_columns:
            encoded[name] = [np.array(row, dtype=np.int64) for row in encoded[name]]
        return encoded

    function = encode if isinstance(rows, IterableDataset) else encode_as_arrays
    columns = list(rows.column_names)
    return rows.map(function, batched=True, with_indices=True, remove_columns=columns, **kwargs)
