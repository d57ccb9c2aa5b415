"""Counts and tables in the texts that commands print."""

from __future__ import annotations

from collections.abc import Sequence


def plural(number: int, noun: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def aligned_rows(rows: Sequence[Sequence[str]], has_numbers: bool = False) -> list[str]:
    """
    Format the rows of a table as lines whose columns are aligned.

    Args:
        rows (`Sequence[Sequence[str]]`): The cells of each row.
        has_numbers (`bool`, *optional*, defaults to `False`): Whether all columns after the first one are aligned
            right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align, lines = str.rjust if has_numbers else str.ljust, []
    for first, *others in rows:
        lines.append("  ".join([first.ljust(widths[0]), *map(align, others, widths[1:])]).rstrip())
    return lines
