"""Rows with a different number of words and tags."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc

from .base import Check
from .finding import Finding, Places
from .site_table import Batch, Columns, SiteTable, is_list


class TagLengths(Check):
    """Finds rows whose list of tags has another length than the list of words."""

    def __init__(self, columns: Columns, tables: list[SiteTable], sites: list[str]) -> None:
        super().__init__(columns, tables, sites)
        self._places = Places()

    def read(self, batch: Batch) -> None:
        self._places.add(batch, different_lengths(batch, self.columns))

    def findings(self) -> Iterator[Finding]:
        for place in self._places:
            yield place.finding(
                self.sites,
                kind="number of tags",
                severity="error",
                message=f"A row has another number of tags in {self.columns.label!r} than words.",
                cure="Give each word one tag, or drop the rows.",
            )


def different_lengths(batch: Batch, columns: Columns) -> np.ndarray:
    """Whether each row has another number of tags than words. Rows without lists have no such difference."""
    labels = batch.column(columns.label)
    words = batch.column(columns.texts[0]) if columns.texts else None
    if labels is None or words is None or not (is_list(labels.type) and is_list(words.type)):
        return np.zeros(len(batch.lines), dtype=bool)
    differs = pc.not_equal(pc.list_value_length(words), pc.list_value_length(labels)).fill_null(False)
    return differs.to_numpy(zero_copy_only=False)
