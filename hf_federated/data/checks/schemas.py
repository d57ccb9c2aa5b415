"""Columns that a site lacks, and columns of different types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from .finding import Finding
from .site_table import CLIENT_COLUMN, TRAIN, Columns, SiteTable, is_list, is_string


def different_schemas(columns: Columns, tables: Sequence[SiteTable]) -> Iterator[Finding]:
    """One finding for each table that lacks a column, or has a column of another type than most tables."""
    kinds: dict[str, Counter[str]] = {}
    trained = [table for table in tables if table.split == TRAIN]
    for table in trained:
        for item in table.schema:
            if item.name == CLIENT_COLUMN:
                continue
            kinds.setdefault(item.name, Counter())[_kind(item.type)] += 1
    used = {*columns.texts, columns.label, columns.site}
    for table in tables:
        found = {item.name: _kind(item.type) for item in table.schema if item.name != CLIENT_COLUMN}
        for name, counts in kinds.items():
            if table.split != TRAIN and name not in used:
                continue
            usual = next((kind for kind, _ in counts.most_common() if kind != "null"), "null")
            if name not in found:
                # A column that few training tables have is an additional column of these tables.
                if 2 * counts.total() >= len(trained):
                    yield _finding(table, "missing column", name, f"There is no column {name!r}.", "Add the column.")
            elif not _fits(found[name], usual):
                yield _finding(
                    table,
                    "different type",
                    name,
                    f"The column {name!r} has {found[name]} values, and {usual} values at most sites.",
                    "Write the column in the same way at all sites.",
                )
        for name in found:
            if table.split == TRAIN and 2 * kinds[name].total() < len(trained):
                yield _finding(
                    table, "missing column", name, f"Most sites have no column {name!r}.", "Remove the column."
                )


def _finding(table: SiteTable, kind: str, column: str, message: str, cure: str) -> Finding:
    return Finding(kind, "error", message, cure, table.site, table.name, value=column, unit=table.unit)


def _kind(arrow_type: pa.DataType) -> str:
    """The kind of a type. Types of the same kind differ only in what a reader guesses or how wide a value is."""
    if pa.types.is_dictionary(arrow_type):
        return _kind(arrow_type.value_type)
    if is_list(arrow_type):
        return f"list of {_kind(arrow_type.value_type)}"
    if is_string(arrow_type):
        return "text"
    if pa.types.is_integer(arrow_type):
        return "integer"
    if pa.types.is_floating(arrow_type) or pa.types.is_decimal(arrow_type):
        return "decimal"
    return str(arrow_type)


def _fits(found: str, usual: str) -> bool:
    # A column without values has no type, and a column of integers with a missing value becomes decimal.
    return found == usual or "null" in found or "null" in usual or {found, usual} == {"integer", "decimal"}
