"""Files and sites without rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .finding import Finding
from .site_table import SiteTable


def empty_sites(tables: Sequence[SiteTable], num_rows: Mapping[int, int]) -> Iterator[Finding]:
    """
    One finding for each table without rows.

    Args:
        tables (`Sequence[SiteTable]`): The tables.
        num_rows (`Mapping[int, int]`): Number of rows of each table by its position.
    """
    for number, table in enumerate(tables):
        if not num_rows.get(number):
            yield Finding(
                "empty site",
                "error",
                "There are no rows.",
                "Remove the file, or export it again: a client without rows cannot train.",
                table.site,
                table.name,
                unit=table.unit,
            )
