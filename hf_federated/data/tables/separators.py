"""Find the separator of a CSV file from its first lines."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from .table import TableError
from .text_format import SEPARATORS, printable_separator


SAMPLE_CHARACTERS = 1 << 18
SAMPLE_ROWS = 200
HOW_TO_SET = "Set data.csv.separator in a recipe or --csv-separator"


@dataclass(frozen=True)
class Fit:
    """
    The columns that a separator makes of the first lines.

    Args:
        num_columns (`int`): The values of the header.
        num_rows (`int`): The rows after the header.
        num_full (`int`): The rows with as many values as the header.
        longest (`int`): The largest number of values of a row.
        longest_line (`int`): The line on which the row with the largest number of values ends.
    """

    num_columns: int
    num_rows: int
    num_full: int
    longest: int
    longest_line: int

    @property
    def is_table(self) -> bool:
        """Whether at least half of the rows have all columns, and no row has more."""
        return self.num_columns > 1 and self.longest <= self.num_columns and 2 * self.num_full >= self.num_rows


def find_separator(path: Path, sample: str, default: str, quote: str | None) -> str:
    """
    Find the separator.

    The default is used if it makes a table, and no other separator makes a table with as many columns. Otherwise the
    separator is used that makes the table with most columns. A file with one column has no separator in its header.

    Args:
        path (`Path`): The file, for error messages.
        sample (`str`): The first characters of the file, of which an incomplete last row is ignored.
        default (`str`): The usual separator of files with this suffix.
        quote (`str`, *optional*): The character around values.

    Raises:
        TableError: If two separators make a table, or none does and the header contains one of them.
    """
    fits = {
        separator: fit_separator(sample, separator, quote)
        for separator in {default: None, **dict.fromkeys(SEPARATORS)}
    }
    tables = [separator for separator, fit in fits.items() if fit.is_table]
    if default in tables:
        # A separator within the values of another one makes fewer columns, such as the comma of decimal numbers.
        rivals = [name for name in tables if fits[name].num_columns >= fits[default].num_columns]
    else:
        most = max((fits[separator].num_columns for separator in tables), default=0)
        rivals = [separator for separator in tables if fits[separator].num_columns == most]
    if len(rivals) == 1:
        return rivals[0]
    if rivals:
        found = " and ".join(f"{printable_separator(name)} makes {fits[name].num_columns}" for name in rivals)
        raise TableError(f"{path}: the separator is ambiguous: {found} columns. {HOW_TO_SET} to one of them.")
    if fits[default].num_columns > 1:
        return default
    candidates = [separator for separator, fit in fits.items() if fit.num_columns > 1]
    if candidates:
        raise TableError(_no_table(path, candidates[0], fits[candidates[0]], default))
    return default


def fit_separator(sample: str, separator: str, quote: str | None) -> Fit:
    """The columns that a separator makes of the first rows of a sample."""
    is_complete = len(sample) < SAMPLE_CHARACTERS
    reader = csv.reader(
        io.StringIO(sample, newline=""),
        delimiter=separator,
        quotechar=quote or '"',
        quoting=csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE,
    )
    rows: list[tuple[int, int]] = []
    try:
        for row in islice(reader, SAMPLE_ROWS + 2):
            if len(row) > 1 or (row and row[0].strip()):
                rows.append((len(row), reader.line_num))
        if not is_complete and len(rows) < SAMPLE_ROWS + 2:
            rows.pop()
    except csv.Error:  # reported with its line when the file is read
        pass
    num_columns = rows[0][0] if rows else 1
    longest, line = max(rows[1:], key=lambda row: row[0], default=(0, 0))
    return Fit(num_columns, len(rows) - 1, sum(row[0] == num_columns for row in rows[1:]), longest, line)


def _no_table(path: Path, separator: str, fit: Fit, default: str) -> str:
    name = printable_separator(separator)
    if fit.longest > fit.num_columns:
        found = f"the header has {fit.num_columns} columns, but line {fit.longest_line} has {fit.longest} values"
        cure = "Put double quotes around values that contain the separator"
    else:
        found = (
            f"the header has {fit.num_columns} columns, but only {fit.num_full} of {fit.num_rows} rows have as many"
        )
        cure = "Correct the header"
    return (
        f"{path}, line 1: the separator cannot be found. With {name}, {found}. {cure}. If the file has one column,"
        f" {HOW_TO_SET[0].lower()}{HOW_TO_SET[1:]} to {printable_separator(default)}."
    )
