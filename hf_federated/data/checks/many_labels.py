"""A label column with nearly as many values as rows, such as a column of ids."""

from __future__ import annotations

from collections.abc import Iterator

from .finding import Finding
from .label_places import LabelPlaces
from .site_table import TRAIN


# With fewer rows, many labels are no sign of a wrong column.
MIN_ROWS = 20
# Rows for each label below which the column is an error, and below which it is a warning.
ERROR_ROWS, WARNING_ROWS = 1.25, 3.0


def many_labels(counts: LabelPlaces) -> Iterator[Finding]:
    """One finding if a label has few rows on average, or if the labels are numbers with a fraction."""
    num_labels, num_rows = len(counts.names), counts.num_rows[TRAIN]
    if counts.is_tags or num_rows < MIN_ROWS or is_label_like(counts):
        return
    place = next(iter(counts.places.values()), None)
    more = "more than " if counts.is_full else ""
    yield Finding(
        "many labels",
        "error" if num_rows < ERROR_ROWS * num_labels else "warning",
        f"The column {counts.column!r} has {more}{num_labels} different labels in {num_rows} rows.",
        "Name the column of the labels (--label-column): a column of ids or texts has no labels.",
        site=None if place is None else counts.sites[place.site] or None,
        file="" if place is None else place.table.name,
        lines=() if place is None else place.lines,
        unit="line" if place is None else place.table.unit,
        count=num_rows,
        value="" if place is None else place.label,
    )


def is_label_like(counts: LabelPlaces) -> bool:
    """Whether the labels have enough rows to be labels, and not ids, texts or quantities."""
    num_rows = counts.num_rows[TRAIN]
    return not counts.is_quantity and (num_rows < MIN_ROWS or num_rows >= WARNING_ROWS * len(counts.names))
