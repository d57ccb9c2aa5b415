"""A finding of a data check: what is wrong, where it is, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np


if TYPE_CHECKING:
    from .site_table import Batch, SiteTable

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
# Number of line numbers that a finding keeps.
MAX_LINES = 5


@dataclass(frozen=True)
class Finding:
    """
    A finding of [`~hf_federated.data.check_datasets`] or `hf-federated check`.

    Args:
        kind (`str`): The kind of the finding, such as `"missing text"`.
        severity (`str`): `"error"` if training refuses the data or learns nothing from them, `"warning"` if the result
            is probably not the wanted one, or `"note"` for what may be as it should be.
        message (`str`): What was found, as a sentence without its place.
        cure (`str`): What to do.
        site (`str`, *optional*): The site. `None` if the finding concerns all sites.
        file (`str`, *optional*, defaults to `""`): The file. Empty if the rows are not in a file.
        lines (`Sequence[int]`, *optional*): The first few line numbers in the file, or row numbers if `unit` is
            `"row"`, from 1.
        count (`int`, *optional*, defaults to `0`): Number of rows that the finding concerns.
        value (`str`, *optional*, defaults to `""`): The value that was found, such as a label.
        unit (`str`, *optional*, defaults to `"line"`): `"line"` for lines of a file, or `"row"`.

    Example:

    ```python
    >>> from hf_federated.data import Finding

    >>> finding = Finding(
    ...     "missing text", "error", "The column 'text' is empty.", "Drop the rows.", "north", "north.csv", (5, 9), 7
    ... )
    >>> print(finding)
    error: north.csv, lines 5, 9 and 5 more: The column 'text' is empty. Drop the rows.

    ```
    """

    kind: str
    severity: Severity
    message: str
    cure: str
    site: str | None = None
    file: str = ""
    lines: Sequence[int] = ()
    count: int = 0
    value: str = ""
    unit: str = "line"

    @property
    def place(self) -> str:
        """The file or the site, with the first line numbers. Empty if the finding concerns all sites."""
        words = [self.file or (f"site {self.site!r}" if self.site is not None else "")]
        if self.lines:
            shown, num_more = ", ".join(map(str, self.lines)), self.count - len(self.lines)
            if len(self.lines) == 1:
                words.append(f"{self.unit} {shown}{f' (the first of {self.count})' if num_more > 0 else ''}")
            else:
                words.append(f"{self.unit}s {shown}{f' and {num_more} more' if num_more > 0 else ''}")
        return ", ".join(filter(None, words))

    def __str__(self) -> str:
        return f"{self.severity}: {self.placed_message} {self.cure}".rstrip()

    @property
    def placed_message(self) -> str:
        """The place and the message."""
        # The error of a reader already has the file and the line.
        has_place = not self.place or (self.file and self.message.startswith(self.file))
        return self.message if has_place else f"{self.place}: {self.message}"


@dataclass
class Place:
    """The rows of one site in one file: their number and the first line numbers."""

    site: int
    table: SiteTable
    count: int = 0
    lines: tuple[int, ...] = ()

    def finding(self, sites: Sequence[str], **fields: Any) -> Finding:
        """A finding at this place."""
        return Finding(
            site=sites[self.site] or None,
            file=self.table.name,
            lines=self.lines,
            count=self.count,
            unit=self.table.unit,
            **fields,
        )


class Places:
    """The places of rows that a check collects, in the order in which they were read."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], Place] = {}

    def add(self, batch: Batch, mask: np.ndarray) -> None:
        """Add the rows of a batch for which `mask` is true."""
        if mask.any():
            rows = np.flatnonzero(mask)
            self.add_rows(batch.table, batch.sites[rows], batch.lines[rows])

    def add_rows(self, table: SiteTable, sites: np.ndarray, lines: np.ndarray) -> None:
        """Add rows of a table with these sites and line numbers."""
        for site, rows in grouped_rows(sites):
            place = self._places.setdefault((id(table), site), Place(site, table))
            found = lines[rows]
            place.count += len(found)
            if len(place.lines) < MAX_LINES:
                place.lines += tuple(found[: MAX_LINES - len(place.lines)].tolist())

    def __iter__(self) -> Iterator[Place]:
        return iter(self._places.values())

    def __len__(self) -> int:
        return len(self._places)


def grouped_rows(keys: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each distinct key with the positions at which it occurs, in ascending order."""
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts)[1:], strict=True)
