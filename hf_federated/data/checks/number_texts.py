"""Numbers that are stored as text: texts that are numbers, and labels that are quantities."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from .base import Check
from .finding import Finding, Place
from .label_places import LabelPlaces
from .site_table import Batch, Columns, SiteTable, is_string


NUMBER = r"^\s*[-+]?\d+([.,]\d+)*\s*$"
FRACTION = re.compile(r"\s*[-+]?\d+[.,]\d+\s*")
# From this share of numbers on, a column of texts is a column of numbers.
MIN_SHARE = 0.9


class NumberTexts(Check):
    """Finds tables whose texts are numbers."""

    def __init__(self, columns: Columns, tables: list[SiteTable], sites: list[str]) -> None:
        super().__init__(columns, tables, sites)
        self._num_rows: Counter[tuple[int, str]] = Counter()
        self._places: dict[tuple[int, str], Place] = {}

    def read(self, batch: Batch) -> None:
        for name in self.columns.texts:
            values = batch.column(name)
            if values is None or pa.types.is_nested(values.type):
                continue
            key = (id(batch.table), name)
            self._num_rows[key] += len(values) - values.null_count
            if is_string(values.type):
                is_number = pc.match_substring_regex(values, NUMBER).fill_null(False)
            else:
                is_number = values.is_valid()
            if count := is_number.true_count:
                first = pc.index(is_number, True).as_py()
                place = self._places.setdefault(
                    key, Place(int(batch.sites[first]), batch.table, 0, (int(batch.lines[first]),))
                )
                place.count += count

    def findings(self) -> Iterator[Finding]:
        for (table, name), place in self._places.items():
            if place.count >= MIN_SHARE * self._num_rows[table, name]:
                yield place.finding(
                    self.sites,
                    kind="numbers as text",
                    severity="warning",
                    message=f"Texts in {name!r} are numbers: {place.count} of {self._num_rows[table, name]}.",
                    cure="Name the column of the texts (--text-column).",
                )


def number_labels(counts: LabelPlaces) -> Iterator[Finding]:
    """One finding if all labels are texts of numbers with a fraction, which are quantities and not labels."""
    if counts.is_full or counts.is_tags or not counts.is_text or not counts.places:
        return
    fractions = [place for place in counts.places.values() if FRACTION.fullmatch(place.label)]
    if fractions and all(re.match(NUMBER, name) for name in counts.names):
        yield fractions[0].finding(
            counts.sites,
            kind="numbers as text",
            severity="warning",
            message=f"The labels in the column {counts.column!r} are numbers that are stored as text, such as"
            f" {fractions[0].label!r}. Each number becomes a class.",
            cure="Convert quantities to classes, or name another column (--label-column).",
            value=fractions[0].label,
        )
