"""Files and sites without rows, and files that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .finding import Finding
from .site_table import SiteTable


def unreadable_tables(tables: Sequence[SiteTable], errors: Mapping[int, str]) -> Iterator[Finding]:
    """
    One finding for each table that cannot be read.

    Args:
        tables (`Sequence[SiteTable]`): The tables.
        errors (`Mapping[int, str]`): The reason by the position of the table.
    """
    for number, error in errors.items():
        table = tables[number]
        if not table.is_empty:
            yield Finding("unreadable file", "error", error, "", table.site, table.name, unit=table.unit)


def empty_sites(
    tables: Sequence[SiteTable], num_rows: Mapping[int, int], errors: Mapping[int, str]
) -> Iterator[Finding]:
    """
    One finding for each table without rows.

    Args:
        tables (`Sequence[SiteTable]`): The tables.
        num_rows (`Mapping[int, int]`): Number of rows of each table by its position.
        errors (`Mapping[int, str]`): Why a table cannot be read, by its position.
    """
    for number, table in enumerate(tables):
        if table.is_empty or not (num_rows.get(number) or number in errors):
            yield Finding(
                "empty site",
                "error",
                "There are no rows.",
                "Remove the file, or export it again: a client without rows cannot train.",
                table.site,
                table.name,
                unit=table.unit,
            )
