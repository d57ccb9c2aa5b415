"""Texts that are longer than the model reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .base import Check
from .finding import Finding, Place, Places
from .site_table import Batch, Columns, SiteTable, is_list


# From this share of the rows of a site on, cut texts are a warning. Below it, they are a note.
WARNING_SHARE = 0.05


class CutTexts(Check):
    """
    Finds rows with more tokens than a model reads. Only texts with more bytes than this number are tokenized.

    Args:
        columns ([`Columns`]): The columns to read.
        tables (`list[SiteTable]`): The tables.
        sites (`list[str]`): The names of the sites.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        max_length (`int`): Number of tokens that the model reads, including special tokens.
    """

    def __init__(
        self, columns: Columns, tables: list[SiteTable], sites: list[str], tokenizer: Any, max_length: int
    ) -> None:
        super().__init__(columns, tables, sites)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self._num_rows: Counter[tuple[int, int]] = Counter()
        self._places = Places()
        self._longest = 0

    def read(self, batch: Batch) -> None:
        texts = [values for values in map(batch.column, self.columns.texts) if values is not None]
        if not texts:
            return
        for site, count in zip(*np.unique(batch.sites, return_counts=True), strict=True):
            self._num_rows[id(batch.table), int(site)] += int(count)
        num_bytes = sum(_num_bytes(values) for values in texts)
        long = np.flatnonzero(num_bytes + self.tokenizer.num_special_tokens_to_add(len(texts) > 1) > self.max_length)
        if not len(long):
            return
        lengths = self._lengths([values.take(pa.array(long)) for values in texts])
        self._longest = max(self._longest, int(lengths.max()))
        mask = np.zeros(len(batch.lines), dtype=bool)
        mask[long[lengths > self.max_length]] = True
        self._places.add(batch, mask)

    def _lengths(self, texts: list[pa.Array]) -> np.ndarray:
        """The number of tokens of each row, with the special tokens."""
        num_special = self.tokenizer.num_special_tokens_to_add(len(texts) > 1)
        total = np.full(len(texts[0]), num_special)
        for values in texts:
            is_words = is_list(values.type)
            rows = [value or ([""] if is_words else "") for value in values.to_pylist()]
            encoded = self.tokenizer(
                rows, add_special_tokens=False, is_split_into_words=is_words, verbose=False, truncation=False
            )
            total += np.array([len(ids) for ids in encoded["input_ids"]])
        return total

    def findings(self) -> Iterator[Finding]:
        for place in self._places:
            yield self._finding(place, self._num_rows[id(place.table), place.site])

    def _finding(self, place: Place, num_rows: int) -> Finding:
        return place.finding(
            self.sites,
            kind="cut text",
            severity="warning" if place.count >= WARNING_SHARE * num_rows else "note",
            message=f"More than {self.max_length} tokens (up to {self._longest}) in {place.count} of {num_rows} rows."
            " The model does not read the rest.",
            cure="Choose a model that reads longer texts, or split or shorten the texts.",
        )


def _num_bytes(values: pa.Array) -> np.ndarray:
    """The number of bytes of each text, or of the words of each list."""
    if not is_list(values.type):
        return pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    words = pc.binary_length(values.flatten()).fill_null(0).to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
    return np.bincount(rows, weights=words, minlength=len(values)).astype(np.int64)


def model_limit(tokenizer: Any, config: dict[str, Any]) -> int | None:
    """
    The number of tokens that a model reads, or `None` if it has no limit.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        config (`dict`): The content of `config.json` of the model.
    """
    limits = [tokenizer.model_max_length, config.get("max_position_embeddings"), config.get("n_positions")]
    # Transformers uses a very large number for an unknown limit.
    known = [int(limit) for limit in limits if isinstance(limit, (int, float)) and 0 < limit < 10**9]
    return min(known, default=None)
