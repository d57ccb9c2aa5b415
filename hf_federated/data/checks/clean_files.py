"""Write clean files: without incomplete or repeated rows, and with corrected names of sites and labels."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...utils.client_names import escape_client_ids
from ..site_files import site_name
from ..tables import TableError
from .doctor import Sites
from .duplicates import first_occurrences
from .hashes import row_hashes
from .label_places import LabelPlaces
from .look_alikes import canonical_names, label_names, rows_text
from .many_labels import is_label_like
from .missing_values import incomplete_rows
from .site_table import TEST, Batch, Columns, SiteTable, is_string
from .table_writers import SUFFIXES, TableWriter
from .tag_lengths import different_lengths


CHANGES = "CHANGES.md"


@dataclass
class Changes:
    """
    What differs between the files that were read and the files that were written.

    Args:
        lines (`list[str]`): The changes, one sentence each.
        dropped (`Counter[str]`): Number of dropped rows by reason.
        renamed (`Counter[str]`): Number of rows with a corrected name, by `"site"` and `"label"`.
        num_rows (`int`): Number of rows that were written.
    """

    lines: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    renamed: Counter[str] = field(default_factory=Counter)
    num_rows: int = 0

    def drop(self, batch: Batch, mask: np.ndarray, reason: str) -> None:
        """Record dropped rows."""
        self.dropped[reason] += int(mask.sum())
        table = batch.table
        self.lines += [f"{table.name}, {table.unit} {line}: dropped, {reason}" for line in batch.lines[mask].tolist()]

    def rename(self, batch: Batch, kind: str, name: str, new: str, count: int) -> None:
        """Record a corrected name."""
        self.renamed[kind] += count
        self.lines.append(f"{batch.table.name}: the {kind} {name!r} is written as {new!r} in {rows_text(count)}")


@dataclass(frozen=True)
class Corrections:
    """
    What is corrected.

    Args:
        sites (`dict[str, str]`): The name of each site.
        labels (`dict[str, str]`): The name of each label.
        repeated (`np.ndarray`, *optional*): Whether each row repeats a text, over the rows of all tables.
        tables (`Sequence[SiteTable]`): The tables of which all rows can be read.
    """

    sites: Mapping[str, str]
    labels: Mapping[str, str]
    repeated: np.ndarray | None
    tables: Sequence[SiteTable]


def write_clean_files(
    tables: Sequence[SiteTable], columns: Columns, folder: Path, drop_duplicates: bool = False
) -> list[str]:
    """
    Write a clean copy of all tables that can be read, and the list of changes as `CHANGES.md`.

    Rows without a text, a label or a site are dropped, and rows with another number of tags than words. Names of sites
    and labels lose the whitespace around them. Sites that look alike become the most frequent of them. So do labels
    with less than 10 % of the rows of both. CSV files are written as UTF-8 with commas.

    Args:
        tables (`Sequence[SiteTable]`): The tables, with the training tables first.
        columns ([`Columns`]): The columns of texts, labels and sites.
        folder (`Path`): A new or empty folder. Test tables are written to its subfolder `test`.
        drop_duplicates (`bool`, *optional*, defaults to `False`): Whether rows that repeat a text are dropped. The
            first row is kept, and a training row rather than a test row.

    Returns:
        `list[str]`: A summary of the changes.

    Raises:
        ValueError: If the folder is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError("the folder is not empty. Name a new folder, so that no file is replaced.")
    corrections = _corrections(tables, columns, drop_duplicates)
    readable = corrections.tables
    left = set(map(id, tables)) - set(map(id, readable))
    paths = _targets(readable, corrections.sites)
    # An error leaves no folder with a part of the files.
    target = Path(os.path.abspath(folder))
    temporary = target.with_name(f".{target.name}.part-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        changes, num_rows = _write(readable, columns, corrections, paths, temporary)
        changes.lines += [line for path, line in _renamed_files(readable, paths).items() if path in num_rows]
        summary = _summary(changes, num_rows, temporary, [table for table in tables if id(table) in left])
        if folder.exists():
            for path in temporary.iterdir():
                path.rename(folder / path.name)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [f"Wrote {rows_text(changes.num_rows)} in {len(num_rows)} files to {folder}.", *summary]


def _write(
    tables: Sequence[SiteTable],
    columns: Columns,
    corrections: Corrections,
    paths: Sequence[Path],
    folder: Path,
) -> tuple[Changes, dict[Path, int]]:
    """Write the clean rows of each table to its path in the folder. Return the changes, and the rows of each file."""
    changes = Changes()
    writers: dict[Path, TableWriter] = {}
    position = 0
    try:
        for table, path in zip(tables, paths, strict=True):
            for batch in _batches(table, columns):
                repeated = corrections.repeated
                part = None if repeated is None else repeated[position : position + len(batch.lines)]
                position += len(batch.lines)
                rows = _clean_rows(batch, columns, corrections, part, changes)
                if path not in writers:
                    (folder / path).parent.mkdir(parents=True, exist_ok=True)
                    writers[path] = TableWriter(folder / path, rows.schema)
                writers[path].write(rows)
                changes.num_rows += len(rows)
    finally:
        for writer in writers.values():
            writer.close()
    return changes, {path: writer.num_rows for path, writer in writers.items()}


def _corrections(tables: Sequence[SiteTable], columns: Columns, drop_duplicates: bool) -> Corrections:
    """Read all rows once, and find the names to correct and the rows that repeat a text."""
    sites, hashes = Sites(), [np.empty(0, dtype=np.uint64)]
    labels = LabelPlaces(columns.label, sites.names)
    readable = []
    for table in tables:
        found: list[np.ndarray] = []
        try:
            for batch in _batches(table, columns, sites):
                labels.read(batch)
                if drop_duplicates:
                    found.append(_hashes(batch, columns, len(hashes) + len(found)))
        except TableError:
            continue
        if not table.error:
            readable.append(table)
            hashes += found
    sizes: Counter[str] = Counter()
    if labels.is_text and not labels.is_full and not labels.is_tags and is_label_like(labels):
        for (_, label, _), place in labels.places.items():
            sizes[label] += place.count
    return Corrections(
        canonical_names({name: place.count for name, place in sites.places.items() if name}),
        label_names(sizes),
        _repeated(np.concatenate(hashes)) if drop_duplicates else None,
        readable,
    )


def _hashes(batch: Batch, columns: Columns, number: int) -> np.ndarray:
    """A number for each row that rows with the same texts share. Incomplete rows are no originals."""
    unique = np.arange(len(batch.lines), dtype=np.uint64) + np.uint64(number << 32)
    texts = [values for values in map(batch.column, columns.texts) if values is not None]
    if not texts or len(texts) < len(columns.texts):
        return unique
    return np.where(incomplete_rows(batch, columns), unique, row_hashes(texts))


def _repeated(hashes: np.ndarray) -> np.ndarray:
    return first_occurrences(hashes) != np.arange(len(hashes)) if len(hashes) else np.empty(0, dtype=bool)


def _batches(table: SiteTable, columns: Columns, sites: Sites | None = None) -> Iterator[Batch]:
    """The rows as they are written: the values of a CSV file keep their text, such as leading zeros."""
    sites = sites or Sites()
    for lines, rows in table.read(as_text=True):
        if len(lines):
            yield sites.batch(table, columns, lines, _decoded(rows))


def _decoded(rows: pa.RecordBatch | pa.Table) -> pa.RecordBatch | pa.Table:
    """The rows with the values that categories of pandas name."""
    for place, item in enumerate(rows.schema):
        if pa.types.is_dictionary(item.type):
            rows = rows.set_column(place, item.name, rows.column(place).cast(item.type.value_type))
    return rows


def _clean_rows(
    batch: Batch, columns: Columns, corrections: Corrections, repeated: np.ndarray | None, changes: Changes
) -> pa.RecordBatch | pa.Table:
    incomplete = incomplete_rows(batch, columns)
    changes.drop(batch, incomplete, "without a text, label or site")
    dropped = different_lengths(batch, columns) & ~incomplete
    changes.drop(batch, dropped, "with another number of tags than words")
    dropped |= incomplete
    if repeated is not None:
        changes.drop(batch, repeated & ~dropped, "with a repeated text")
        dropped = dropped | repeated
    rows = batch.rows.filter(pa.array(~dropped))
    for kind, name, names in (
        ("site", columns.site, corrections.sites),
        ("label", columns.label, corrections.labels),
    ):
        if name is not None and name in rows.schema.names and is_string(rows.schema.field(name).type):
            rows = _renamed(batch, rows, kind, name, names, changes)
    return rows


def _renamed(batch: Batch, rows: Any, kind: str, column: str, names: Mapping[str, str], changes: Changes) -> Any:
    values = rows.column(column)
    counts = {item["values"]: item["counts"] for item in pc.value_counts(values).to_pylist()}
    wrong = {name: names[name] for name in counts if names.get(name, name) != name}
    if not wrong:
        return rows
    for name, new in wrong.items():
        changes.rename(batch, kind, name, new, counts[name])
    positions = pc.index_in(values, pa.array(list(wrong), type=values.type))
    corrected = pc.coalesce(pc.take(pa.array(list(wrong.values()), type=values.type), positions), values)
    return rows.set_column(rows.schema.get_field_index(column), column, corrected)


def _targets(tables: Sequence[SiteTable], sites: Mapping[str, str]) -> list[Path]:
    """The path of the clean copy of each table, in the new folder. Tables of one site have one path."""
    found: dict[Path, Path] = {}
    paths = []
    for table in tables:
        folder = Path("test" if table.split == TEST else "")
        if table.file is None:
            (name,) = escape_client_ids([sites.get(table.site or "", table.site or "")]).values()
            suffix = ".parquet"
        else:
            name = sites.get(table.site, table.site) if table.site else site_name(Path(table.name))
            suffix = SUFFIXES.get(table.file.kind, ".csv")
        # The first table of a site determines the format.
        paths.append(found.setdefault(folder / name, folder / f"{name}{suffix}"))
    return paths


def _renamed_files(tables: Sequence[SiteTable], paths: Sequence[Path]) -> dict[Path, str]:
    """A sentence for each written file with the rows of several files, or with another name than its file."""
    sources: dict[Path, list[str]] = {}
    for table, path in zip(tables, paths, strict=True):
        sources.setdefault(path, []).append(table.name)
    return {
        path: f"{' and '.join(names)}: written {'together ' if len(names) > 1 else ''}as {path.as_posix()}"
        for path, names in sources.items()
        if len(names) > 1 or Path(names[0]).name != path.name
    }


def _summary(changes: Changes, num_rows: Mapping[Path, int], folder: Path, left: Sequence[SiteTable]) -> list[str]:
    """Write the list of changes, and return the lines of the summary."""
    notes = [f"{path.as_posix()} has no rows left." for path, count in num_rows.items() if not count]
    notes += [f"{table.name} cannot be read and is left out." for table in left]
    text = "\n".join(["# Changes", "", *(f"- {line}" for line in changes.lines + notes)])
    (folder / CHANGES).write_text(f"{text}\n", encoding="utf-8")
    lines = [f"Dropped {rows_text(count)} {reason}." for reason, count in changes.dropped.items() if count]
    lines += [f"Corrected the {kind} of {rows_text(count)}." for kind, count in changes.renamed.items()]
    return [*lines, *notes, f"{CHANGES} in the folder lists the changes."]
