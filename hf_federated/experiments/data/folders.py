"""Load the splits of a local folder, or of a dataset on the Hub, and check local folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import Dataset, Features, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.csv.csv import CsvConfig

from hf_federated.data.tables import (
    TABLE_SUFFIXES,
    TableError,
    TableOptions,
    data_suffix,
    load_tables,
    read_table,
    table_notes,
)
from hf_federated.experiments.data.files import label_names, log_notes
from hf_federated.experiments.errors import CommandError


def load_named_splits(
    path: str,
    names: Sequence[str] | None = None,
    config: str | None = None,
    revision: str | None = None,
    options: TableOptions | None = None,
) -> dict[str, Dataset]:
    """
    Load splits of a folder or of a dataset on the Hub.

    Args:
        path (`str`): The folder or the Hub id.
        names (`Sequence[str]`, *optional*): The splits, such as `["train[:10%]"]`. Defaults to all.
        config (`str`, *optional*): Configuration of the dataset.
        revision (`str`, *optional*): Branch, tag or commit of a dataset on the Hub.
        options ([`TableOptions`], *optional*): What is known about CSV files.

    Raises:
        CommandError: If a file cannot be read.
    """
    files = None
    if Path(path).is_dir():
        check_single_format(Path(path))
        check_same_schema(Path(path))
        builder = load_dataset_builder(path, config)
        # If the card of a folder lists the data files, `datasets` reuses its cache even if the files change or another
        # folder has the same name. With explicit `data_files`, it detects changes.
        files = _files(builder.config)
        if names is not None and all(name in files for name in names):
            files = {name: files[name] for name in names}
        has_card_features = (
            names is None and (Path(path) / "README.md").is_file() and builder.info.features is not None
        )
        if _is_plain_csv(builder.config) and not has_card_features:
            return _load_csv(files, names, options)
        if names is None:
            names, files = list(files), None  # with the features of the card
    names = list(split_names(path, config, revision) if names is None else names)
    try:
        parts = load_dataset(path, config, data_files=files, revision=revision, split=names)
    except DatasetsError as error:
        if isinstance(error, OSError):  # the dataset was not found
            raise
        raise CommandError(f"{path} cannot be read: {' '.join(str(error.__cause__ or error).split())}") from error
    return dict(zip(names, parts, strict=True))


def split_names(path: str, config: str | None = None, revision: str | None = None) -> list[str]:
    """The names of the splits of a folder or of a dataset on the Hub."""
    builder = load_dataset_builder(path, config, revision=None if Path(path).is_dir() else revision)
    if Path(path).is_dir():
        return list(_files(builder.config))
    return list(builder.info.splits or builder.config.data_files or {})


def _files(config: Any) -> dict[str, list[str]]:
    """The data files of each split."""
    return {str(split): list(map(str, paths)) for split, paths in (config.data_files or {}).items()}


def _is_plain_csv(config: Any) -> bool:
    """Whether a folder has CSV files, and no card that sets how to read them. Tabs are the default of TSV files."""
    if not isinstance(config, CsvConfig) or config.features is not None:
        return False
    given, default = config.pd_read_csv_kwargs, CsvConfig().pd_read_csv_kwargs
    return {**given, "sep": None} == {**default, "sep": None} and given["sep"] in (",", "\t")


def _load_csv(
    files: dict[str, list[str]], names: Sequence[str] | None, options: TableOptions | None
) -> dict[str, Dataset]:
    paths = [path for paths in files.values() for path in paths]
    try:
        log_notes((path, table_notes(read_table(path, options))) for path in paths)
        return load_tables(files, options, names)
    except TableError as error:
        raise CommandError(str(error)) from error


def check_same_schema(folder: Path) -> None:
    """
    Check that all Parquet files of a folder have the same columns and label names.

    `datasets` reads all files with the features of the first file, so label ids would change their meaning.

    Raises:
        CommandError: If two files differ in their columns or in the order of their label names.
    """
    first: tuple[Path, Features] | None = None
    for path in sorted(folder.rglob("*.parquet")):
        features = Features.from_arrow_schema(pq.read_schema(path))
        first = first or (path, features)
        expected, found = (
            {name: label_names(feature) for name, feature in schema.items()} for schema in (first[1], features)
        )
        if expected != found:
            raise CommandError(
                f"{first[0].relative_to(folder)} and {path.relative_to(folder)} in {folder} differ in their columns or"
                " label names. Write both files with the same features."
            )


def check_single_format(folder: Path) -> None:
    """
    Check that all data files of a folder have the same format, because `datasets` reads only one format.

    Raises:
        CommandError: If the folder has data files of several formats.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    if files and all(path.suffix.lower() in (".xlsx", ".txt", ".md") for path in files):
        workbook = next((path for path in files if path.suffix.lower() == ".xlsx"), None)
        if workbook is not None:
            raise CommandError(
                f"{workbook} is an Excel workbook, but the splits of a folder are not read from workbooks. Give the"
                " path of the workbook, save it as CSV, or use `hf-federated partition --client-per-file` if each file"
                " is a client."
            )
    found = {data_suffix(path): path for path in files}
    found = {suffix: path for suffix, path in found.items() if suffix not in (None, ".txt", ".xlsx")}
    readers = {TABLE_SUFFIXES[str(suffix)]: path for suffix, path in found.items()}
    if len(readers) > 1:
        examples = ", ".join(str(path.relative_to(folder)) for path in readers.values())
        raise CommandError(
            f"{folder} has files of several formats ({examples}), and only one of them would be read. Keep files of"
            " one format."
        )
