"""Texts that occur more than once: within a site, at several sites, or in training and test examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .base import Check
from .finding import MAX_LINES, Finding, grouped_rows
from .hashes import column_hashes, row_hashes
from .site_table import TEST, Batch, Columns, SiteTable, blank


# From this share of all rows on, duplicates are a warning, and from this share and number of rows of a site on. Below,
# they are a note.
WARNING_SHARE, SITE_SHARE, SITE_ROWS = 0.01, 0.1, 5
DROP = "Drop the repeated rows (--fix DIR --drop-duplicates)"
CURES = {
    "duplicate": f"{DROP}, unless they are different examples with the same text.",
    "duplicate between sites": f"{DROP}, or train on them if the sites really have the same examples.",
    "duplicate in training and test": "Remove the rows from the test examples: the metrics on them measure memory.",
}


@dataclass(frozen=True, eq=False)
class Rows:
    """What is kept of each row: hashes of its text and its label, and its place."""

    texts: np.ndarray
    labels: np.ndarray
    sites: np.ndarray
    tables: np.ndarray
    lines: np.ndarray


class Duplicates(Check):
    """
    Finds texts that occur more than once. It keeps 40 bytes for each row.

    The first row with a text is the original. A test row whose text is also a training text counts as a duplicate in
    training and test. Any other row counts as a duplicate within its site if a row before it at the same site has the
    same text, and otherwise as a duplicate between sites.
    """

    def __init__(self, columns: Columns, tables: list[SiteTable], sites: list[str]) -> None:
        super().__init__(columns, tables, sites)
        self._numbers = {id(table): number for number, table in enumerate(tables)}
        self._parts: list[Rows] = []

    def read(self, batch: Batch) -> None:
        texts = [values for values in map(batch.column, self.columns.texts) if values is not None]
        if not texts or len(texts) < len(self.columns.texts):
            return
        kept = ~np.logical_or.reduce([blank(values) for values in texts])
        labels = batch.column(self.columns.label)
        hashes = row_hashes(texts)[kept]
        self._parts.append(
            Rows(
                texts=hashes,
                labels=np.zeros_like(hashes) if labels is None else column_hashes(labels)[kept],
                sites=batch.sites[kept],
                tables=np.full(len(hashes), self._numbers[id(batch.table)]),
                lines=batch.lines[kept],
            )
        )

    def findings(self) -> Iterator[Finding]:
        if not self._parts:
            return
        parts = zip(*(vars(part).values() for part in self._parts), strict=True)
        rows = Rows(*map(np.concatenate, parts))
        self._parts = []
        is_test = np.array([table.split == TEST for table in self.tables])[rows.tables]
        first = first_occurrences(rows.texts)
        repeated = np.flatnonzero(first != np.arange(len(first)))
        if not len(repeated):
            return
        # The same text at the same site in the same split.
        place = (rows.sites * 2 + is_test).astype(np.uint64)
        within = first_occurrences(rows.texts * np.uint64(2 * len(self.sites) + 1) + place)
        leaked = is_test[repeated] & ~is_test[first[repeated]]
        local = (within[repeated] != repeated) & ~leaked
        yield from self._by_place(rows, repeated[leaked], first, "duplicate in training and test")
        yield from self._by_place(rows, repeated[local], within, "duplicate")
        yield from self._by_place(rows, repeated[~leaked & ~local], first, "duplicate between sites")

    def _by_place(self, rows: Rows, found: np.ndarray, original: np.ndarray, kind: str) -> Iterator[Finding]:
        """One finding for the rows of each site in each file."""
        is_frequent = len(found) >= WARNING_SHARE * len(rows.lines) or kind == "duplicate in training and test"
        keys = rows.tables * len(self.sites) + rows.sites
        sizes = dict(zip(*(part.tolist() for part in np.unique(keys, return_counts=True)), strict=True))
        for key, positions in grouped_rows(keys[found]):
            table, site = divmod(key, len(self.sites))
            here, num_rows = found[positions], sizes[key]
            first = original[here[0]]
            other = self.tables[rows.tables[first]]
            relabeled = int((rows.labels[here] != rows.labels[original[here]]).sum())
            yield Finding(
                kind,
                "warning" if is_frequent or len(here) >= max(SITE_ROWS, SITE_SHARE * num_rows) else "note",
                f"Repeated texts in {len(here)} of {num_rows} rows; the first is that of"
                f" {self._where(other, rows, int(first))}"
                + (f". Rows with another label than the original: {relabeled}." if relabeled else "."),
                CURES[kind],
                self.sites[site] or None,
                self.tables[table].name,
                tuple(rows.lines[here[:MAX_LINES]].tolist()),
                len(here),
                unit=self.tables[table].unit,
            )

    def _where(self, table: SiteTable, rows: Rows, row: int) -> str:
        site = self.sites[rows.sites[row]]
        of_site = f" of site {site!r}" if site else ""
        return f"{table.unit} {rows.lines[row]}{of_site}{f' ({table.name})' if table.name else ''}"


def first_occurrences(values: np.ndarray) -> np.ndarray:
    """The position of the first equal value of each value."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    first = np.empty(len(values), dtype=np.int64)
    first[order] = np.repeat(order[starts], np.diff(np.append(starts, len(values))))
    return first
