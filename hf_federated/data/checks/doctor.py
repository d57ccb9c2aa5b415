"""Run all checks over the rows of all sites in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..tables import TableError
from .base import Check
from .constant_label import constant_labels
from .cut_texts import CutTexts
from .duplicates import Duplicates
from .empty_sites import empty_sites, unreadable_tables
from .entities import sites_without_entities
from .file_notes import file_notes
from .finding import SEVERITIES, Finding, Place
from .label_places import LabelPlaces
from .look_alikes import look_alike_labels, look_alike_sites
from .many_labels import many_labels
from .missing_values import MissingValues
from .number_texts import NumberTexts, number_labels
from .schemas import different_schemas
from .single_site_labels import single_site_labels, test_only_labels
from .site_table import CLIENT_COLUMN, TRAIN, Batch, Columns, SiteTable
from .tag_lengths import TagLengths


@dataclass(frozen=True)
class Limit:
    """
    The number of tokens that a model reads.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the model.
        max_length (`int`): Number of tokens, including special tokens.
    """

    tokenizer: Any
    max_length: int


@dataclass(frozen=True)
class Report:
    """
    The findings of all checks, and the counts of rows and labels.

    Args:
        findings (`list[Finding]`): The findings, with errors first.
        columns ([`Columns`]): The columns that the checks read.
        sites (`dict[str, int]`): Number of training rows of each site.
        num_rows (`dict[str, int]`): Number of rows by split.
        labels (`dict[str, dict[str, int]]`): Number of training rows by label and site. For tags, number of tags.
        skipped (`list[str]`): The checks that did not run, each with the reason.
        notes (`list[str]`): How files were read, if a reader may not expect it, such as their encoding.
    """

    findings: list[Finding]
    columns: Columns
    sites: dict[str, int]
    num_rows: dict[str, int]
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of_severity(self, severity: str) -> list[Finding]:
        """The findings of a severity."""
        return [finding for finding in self.findings if finding.severity == severity]


class Sites:
    """The names of the sites, and the first row and the number of rows of each site."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.places: dict[str, Place] = {}
        self._numbers: dict[str, int] = {}
        self.train_rows: Counter[str] = Counter()

    def batch(self, table: SiteTable, columns: Columns, lines: np.ndarray, rows: Any) -> Batch:
        """Return a batch with the site of each row."""
        batch = Batch(table, np.zeros(len(lines), dtype=np.int64), lines, rows)
        values = batch.column(CLIENT_COLUMN)
        if values is None and table.site is None:
            values = batch.column(columns.site)
        if values is None:
            codes, found = batch.sites, [table.site or ""]
        else:
            encoded = values.dictionary_encode()
            codes = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
            found = [str(value) for value in encoded.dictionary.to_pylist()] + [""]
        numbers = np.array([self._number(name) for name in found], dtype=np.int64)
        batch.sites[:] = numbers[codes]
        present, first, counts = np.unique(batch.sites, return_index=True, return_counts=True)
        for site, row, count in zip(present.tolist(), first.tolist(), counts.tolist(), strict=True):
            name = self.names[site]
            self.places.setdefault(name, Place(site, table, 0, (int(lines[row]),))).count += count
            self.train_rows[name] += count if table.split == TRAIN else 0
        return batch

    def _number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


def examine(
    tables: Sequence[SiteTable], columns: Columns, limit: Limit | None = None, leave_out: Collection[str] = ()
) -> Report:
    """
    Run all checks.

    Args:
        tables (`Sequence[SiteTable]`): The tables, with the training tables first.
        columns ([`Columns`]): The columns to read.
        limit ([`Limit`], *optional*): The number of tokens that the model reads. Without it, texts are not tokenized.
        leave_out (`Collection[str]`, *optional*): Kinds of findings to leave out.

    Returns:
        [`Report`]: The findings and the counts.
    """
    tables, sites = list(tables), Sites()
    counts = LabelPlaces(columns.label, sites.names)
    checks: list[Check] = [
        MissingValues(columns, tables, sites.names),
        TagLengths(columns, tables, sites.names),
        NumberTexts(columns, tables, sites.names),
        Duplicates(columns, tables, sites.names),
    ]
    if limit is not None and columns.texts:
        checks.append(CutTexts(columns, tables, sites.names, limit.tokenizer, limit.max_length))
    num_rows, errors = _read(tables, columns, sites, [counts, *checks])

    def findings() -> Iterator[Finding]:
        yield from unreadable_tables(tables, errors)
        yield from empty_sites(tables, num_rows, errors)
        yield from different_schemas(columns, [table for n, table in enumerate(tables) if n not in errors])
        for check in checks:
            yield from check.findings()
        yield from look_alike_sites({name: place for name, place in sites.places.items() if name})
        for function in (
            many_labels,
            constant_labels,
            look_alike_labels,
            single_site_labels,
            test_only_labels,
            number_labels,
            sites_without_entities,
        ):
            yield from function(counts)

    found = [finding for finding in findings() if finding.kind not in leave_out]
    by_split: Counter[str] = Counter()
    for number, table in enumerate(tables):
        by_split[table.split] += num_rows[number]
    labels = {
        label: {sites.names[place.site]: place.count for place in places}
        for label, places in counts.of_split().items()
        if not counts.is_full
    }
    return Report(
        sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)),
        columns,
        {name: count for name, count in sites.train_rows.items() if count},
        dict(by_split),
        labels,
        _skipped(columns, limit),
        file_notes(tables, errors),
    )


def missing_values(tables: Sequence[SiteTable], columns: Columns) -> list[Finding]:
    """The rows without a text, a label or a site, without any other check."""
    sites = Sites()
    check = MissingValues(columns, list(tables), sites.names)
    _read(tables, columns, sites, [check])
    return list(check.findings())


def _read(
    tables: Sequence[SiteTable], columns: Columns, sites: Sites, readers: Sequence[Any]
) -> tuple[Counter[int], dict[int, str]]:
    """Read all tables once. Return the number of rows, and the reason why a table cannot be read, by position."""
    num_rows: Counter[int] = Counter()
    errors = {number: table.error for number, table in enumerate(tables) if table.error}
    for number, table in enumerate(tables):
        try:
            for lines, rows in table.read():
                if len(lines):
                    num_rows[number] += len(lines)
                    batch = sites.batch(table, columns, lines, rows)
                    for reader in readers:
                        reader.read(batch)
        except TableError as error:
            errors[number] = str(error)
    return num_rows, errors


def _skipped(columns: Columns, limit: Limit | None) -> list[str]:
    skipped = []
    if not columns.texts:
        skipped.append("texts, because no column of texts was found (--text-column)")
    if columns.label is None:
        skipped.append("labels, because no column of labels was found (--label-column)")
    if columns.texts and limit is None:
        skipped.append("texts that are longer than the model reads, because no model is named (--model)")
    return skipped
