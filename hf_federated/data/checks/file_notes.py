"""What a reader may not expect of the files that were read: their encoding, separator, decimals and leading zeros."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..site_files import noted_files
from ..tables import table_notes
from .site_table import SiteTable


def file_notes(tables: Sequence[SiteTable], errors: Collection[int]) -> list[str]:
    """
    The notes, each once with the names of its files.

    Args:
        tables (`Sequence[SiteTable]`): The tables, of which all rows were read.
        errors (`Collection[int]`): The positions of the tables that cannot be read.
    """
    return noted_files(
        (table.name, table_notes(table.file, is_read=True))
        for number, table in enumerate(tables)
        if table.file is not None and number not in errors
    )
