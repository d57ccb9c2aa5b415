"""Rows without a text, without a label or without a site."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .base import Check
from .finding import Finding, Places
from .site_table import Batch, Columns, SiteTable, blank, is_list


# A `ClassLabel` has this number for a missing label.
NO_LABEL = -1


class MissingValues(Check):
    """Finds rows without a text, a label or a site: null, NaN, only whitespace, an empty list, or a tag of null."""

    def __init__(self, columns: Columns, tables: list[SiteTable], sites: list[str]) -> None:
        super().__init__(columns, tables, sites)
        named = [("text", name) for name in columns.texts] + [("label", columns.label), ("site", columns.site)]
        self._places = {(kind, name): Places() for kind, name in named if name is not None}

    def read(self, batch: Batch) -> None:
        for (kind, name), places in self._places.items():
            values = batch.column(name)
            if values is not None:
                mask = missing_labels(values, name in batch.table.label_names) if kind == "label" else blank(values)
                places.add(batch, mask)

    def findings(self) -> Iterator[Finding]:
        for (kind, name), places in self._places.items():
            for place in places:
                yield place.finding(
                    self.sites,
                    kind=f"missing {kind}",
                    severity="error",
                    message=f"The column {name!r} has no {kind}.",
                    cure="Complete or drop the rows (--fix DIR, or data.drop_incomplete: true in a recipe).",
                )


def missing_labels(values: pa.Array, has_names: bool) -> np.ndarray:
    """
    Whether each label is missing.

    Args:
        values (`pyarrow.Array`): Labels, or lists of tags.
        has_names (`bool`): Whether the labels are numbers of names (`ClassLabel`), where -1 is a missing label.
    """
    mask = blank(values)
    if is_list(values.type):
        rows = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
        mask[rows[values.flatten().is_null().to_numpy(zero_copy_only=False)]] = True
    elif has_names and pa.types.is_integer(values.type):
        mask |= pc.equal(values, NO_LABEL).fill_null(True).to_numpy(zero_copy_only=False)
    return mask


def incomplete_rows(batch: Batch, columns: Columns) -> np.ndarray:
    """Whether each row of a batch lacks a text, a label or a site. A missing column counts as complete."""
    mask = np.zeros(len(batch.lines), dtype=bool)
    for name in filter(None, (*columns.texts, columns.site)):
        values = batch.column(name)
        mask |= False if values is None else blank(values)
    labels = batch.column(columns.label)
    return mask if labels is None else mask | missing_labels(labels, columns.label in batch.table.label_names)
