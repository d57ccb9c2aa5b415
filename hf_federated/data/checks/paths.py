"""The tables of a path: a folder with a file for each site, a single file, or a stored federated dataset."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

from ..site_files import (
    SPLIT_NAMES,
    TEST_NAMES,
    data_files,
    same_site_error,
    separator_mistake,
    site_files,
    site_name,
)
from ..storage.folder import open_folder
from ..storage.partition_file import PARTITION_FILE
from ..tables import EmptyTableError, TableError, TableOptions, read_table
from .site_table import TEST, TRAIN, SiteTable
from .sources import class_names, stored_tables


def path_tables(
    path: Path, site_column: str | None = None, options: TableOptions | None = None, split: str | None = None
) -> list[SiteTable]:
    """
    The tables of a path, with the training tables first.

    In a folder of files, each file is a site with the name of the file. A second file of one site is a table with an
    error, except for a workbook that was exported to the other file, which is left out. Files named `train` and
    `test`, and the splits of a federated dataset, have training and test rows.

    Args:
        path (`Path`): A file, a folder of files, or the folder of a federated dataset.
        site_column (`str`, *optional*): The column with the site of each row.
        options (`TableOptions`, *optional*): What is known about CSV files.
        split (`str`, *optional*): The split of all rows, `"train"` or `"test"`. By default, the names of files and the
            splits of a federated dataset determine it.

    Raises:
        ValueError: If the folder has no data files, or a federated dataset has no rows.
    """
    if (path / PARTITION_FILE).is_file():
        return _federated_tables(path, split)
    if path.is_file():
        return [file_table(path, "" if site_column is None else None, split or TRAIN, options)]
    paths = data_files(path)
    if not paths:
        raise ValueError(f"{path} has no data files. Files in subfolders are not read.")
    tables = []
    sites, repeated = site_files(paths)
    for item in sorted([*sites.values(), *repeated]):
        name = split_name(item)
        found = split or (TRAIN if name in (None, TRAIN) else TEST)
        site = None if site_column is not None else "" if name is not None else site_name(item)
        if site and item in repeated:
            tables.append(_error_table(item, site, found, same_site_error(sites[site], item)))
        else:
            tables.append(file_table(item, site, found, options))
    return sorted(tables, key=lambda table: table.split != TRAIN)


def file_table(path: Path, site: str | None, split: str, options: TableOptions | None = None) -> SiteTable:
    """The table of a file. A file that cannot be read is a table with an error."""
    try:
        table = read_table(path, options)
    except (TableError, OSError, EOFError, ImportError, zlib.error, lzma.LZMAError) as error:
        return _error_table(path, site, split, str(error), isinstance(error, EmptyTableError))
    if mistake := separator_mistake(table, options):
        return _error_table(path, site, split, mistake)

    def batches() -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
        return table.batches()

    unit = "row" if table.format is None else "line"
    names = {}
    if table.kind == "Parquet":
        names = class_names(Features.from_arrow_schema(pq.read_schema(path)))
    return SiteTable(str(path), site, table.columns, batches, split, unit, names, table)


def _error_table(path: Path, site: str | None, split: str, error: str, is_empty: bool = False) -> SiteTable:
    return SiteTable(str(path), site, (), lambda: iter(()), split, error=error, is_empty=is_empty)


def split_name(path: Path) -> str | None:
    """The split that a file is named after, such as `"test"` for `test.csv` and `test-00000-of-00001.parquet`."""
    name = site_name(path).lower()
    return next((split for split in SPLIT_NAMES if name == split or name.startswith(f"{split}-0")), None)


def _federated_tables(folder: Path, split: str | None) -> list[SiteTable]:
    splits = open_folder(folder).splits
    trained = TRAIN if TRAIN in splits else splits[0]
    if split is not None:
        return stored_tables(folder, next((name for name in TEST_NAMES if name in splits), trained), split)
    tables = stored_tables(folder, trained)
    test = next((name for name in TEST_NAMES if name in splits and name != trained), None)
    return tables if test is None else [*tables, *stored_tables(folder, test, TEST)]
