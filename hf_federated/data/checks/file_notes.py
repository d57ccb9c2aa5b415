"""What a reader may not expect of the files that were read: their encoding, separator, decimals and leading zeros."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..tables import table_notes
from .site_table import SiteTable


# Number of files that a note names.
MAX_FILES = 3


def file_notes(tables: Sequence[SiteTable], errors: Collection[int]) -> list[str]:
    """
    The notes, each once with the names of its files.

    Args:
        tables (`Sequence[SiteTable]`): The tables, of which all rows were read.
        errors (`Collection[int]`): The positions of the tables that cannot be read.
    """
    names: dict[str, list[str]] = {}
    for number, table in enumerate(tables):
        if table.file is not None and number not in errors:
            # The notes are complete, so that no row is read again.
            for note in table_notes(replace(table.file, read=lambda as_text: iter(()))):
                names.setdefault(note, []).append(table.name)
    return [f"{_listed(files)}: {note}" for note, files in names.items()]


def _listed(files: Sequence[str]) -> str:
    num_more = len(files) - MAX_FILES
    more = "" if num_more < 1 else f" and {num_more} more file{'s' if num_more > 1 else ''}"
    return f"{', '.join(files[:MAX_FILES])}{more}"
