"""Load tables as `datasets.Dataset`, with the cache of `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetsError
from transformers.utils import logging

from .table import TableError
from .table_files import read_table
from .text_format import TableOptions
from .typed_rows import is_text


logger = logging.get_logger(__name__)

# Part of the path of the cache. Increase it when the same file is read as other rows.
READER_VERSION = "2"


@dataclass
class TableDatasetConfig(datasets.BuilderConfig):
    """
    The files and options of a [`TableDataset`].

    Args:
        files (`dict`): The files of each split, each with its path, size and time of change. A changed file is
            therefore read again.
        options (`dict`): The fields of [`TableOptions`].
    """

    files: dict[str, list[tuple[str, int, int]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


class TableDataset(datasets.ArrowBasedBuilder):
    """Builder of a dataset whose rows [`read_table`] reads."""

    BUILDER_CONFIG_CLASS = TableDatasetConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"files": [path for path, _, _ in files]})
            for split, files in self.config.files.items()
        ]

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[int, pa.Table]]:
        options = TableOptions(**self.config.options)
        schema: pa.Schema | None = None
        number = 0
        for path in files:
            table = read_table(path, options)
            if schema is not None and table.columns != schema.names:
                raise TableError(
                    f"{path} has the columns {', '.join(table.columns)}, but {files[0]} has"
                    f" {', '.join(schema.names)}. Give the files of a split the same columns."
                )
            num_notes: int | None = None
            for _, batch in table.batches():
                # `table_notes` returns the notes on the first batch.
                num_notes = len(table.notes) if num_notes is None else num_notes
                if schema is None:
                    schema = batch.schema
                    # A column of text can have only numbers in another file, such as 007.
                    texts = [item.name for item in schema if is_text(item.type)]
                    options = replace(options, text_columns=list(dict.fromkeys([*options.text_columns, *texts])))
                yield number, pa.Table.from_batches([batch])
                number += 1
            for note in table.notes[num_notes:]:
                logger.warning(f"{path}: {note}")


def load_tables(
    files: Mapping[str, Sequence[str | Path]],
    options: TableOptions | None = None,
    splits: Sequence[str] | None = None,
) -> dict[str, datasets.Dataset]:
    r"""
    Load files as datasets.

    The rows are cached as Arrow files, as by `datasets.load_dataset`. A changed file is read again.

    Args:
        files (`Mapping[str, Sequence[str or Path]]`): The files of each split.
        options ([`TableOptions`], *optional*): What is known about CSV files.
        splits (`Sequence[str]`, *optional*): The splits to return, such as `["train[:10%]"]`. Defaults to all.

    Raises:
        TableError: If a file cannot be read.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> from hf_federated.data.tables import load_tables

    >>> path = Path(tempfile.mkdtemp()) / "north.csv"
    >>> _ = path.write_text("text;label\nzu laut, zu heiß;defect\nschön;fine\n", encoding="utf-16")
    >>> load_tables({"train": [path]})["train"][0]
    {'text': 'zu laut, zu heiß', 'label': 'defect'}

    ```
    """
    described: dict[str, list[tuple[str, int, int]]] = {}
    for split, paths in files.items():
        described[split] = []
        for path in map(Path, paths):
            state = path.stat()
            described[split].append((str(path.resolve()), state.st_size, state.st_mtime_ns))
    builder = TableDataset(hash=READER_VERSION, files=described, options=asdict(options or TableOptions()))
    try:
        builder.download_and_prepare()
    except DatasetsError as error:
        if isinstance(error.__cause__, TableError):
            raise error.__cause__ from error
        raise
    names = list(files if splits is None else splits)
    return dict(zip(names, builder.as_dataset(split=names), strict=True))
