"""The interface of a data check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from .finding import Finding
from .site_table import Batch, Columns, SiteTable


class Check(ABC):
    """
    A check of the rows of all sites. It reads each batch once and keeps no rows.

    Args:
        columns ([`Columns`]): The columns to read.
        tables (`list[SiteTable]`): The tables, with the training tables first.
        sites (`list[str]`): The names of the sites, which grows while batches are read.
    """

    def __init__(self, columns: Columns, tables: list[SiteTable], sites: list[str]) -> None:
        self.columns = columns
        self.tables = tables
        self.sites = sites

    @abstractmethod
    def read(self, batch: Batch) -> None:
        """Read a batch."""

    @abstractmethod
    def findings(self) -> Iterable[Finding]:
        """The findings in all batches."""
