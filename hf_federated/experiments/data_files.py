"""Files and folders of rows that a user names."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import ClassLabel, DatasetDict, Features, load_dataset

from hf_federated.experiments.errors import CommandError


READERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".txt": "text"}


def suffix_of(path: Path) -> str | None:
    """What says how a file is read: of `rows.jsonl.gz` what stands before the compression; `None` if nothing does."""
    return next((suffix.lower() for suffix in reversed(path.suffixes) if suffix.lower() in READERS), None)


def load_file(path: Path, split: str) -> DatasetDict:
    """
    Loads one file as one split.

    Raises:
        CommandError: If its format is not known.
    """
    suffix = suffix_of(path)
    if suffix is None:
        raise CommandError(f"{path} is a {path.suffix} file; allowed are {', '.join(READERS)}.")
    options: dict[str, Any] = {"delimiter": "\t"} if suffix == ".tsv" else {}
    return load_dataset(READERS[suffix], data_files={split: glob.escape(str(path))}, **options)


def is_absent(data: str) -> bool:
    """Whether a name that is not there can only be that of a file or folder, and not a data set of the Hub."""
    named_file = suffix_of(Path(data)) is not None or data.startswith((".", "/", "~")) or data.count("/") > 1
    return named_file and not Path(data).exists()


def check_one_schema(folder: Path) -> None:
    """
    Raises:
        CommandError: If Parquet files of a folder differ in columns or in the order of label names; `datasets` reads
            all of them as the first.
    """
    first: tuple[Path, Features] | None = None
    for path in sorted(folder.rglob("*.parquet")):
        features = Features.from_arrow_schema(pq.read_schema(path))
        first = first or (path, features)
        names = [{name: _label_names(feature) for name, feature in one.items()} for one in (first[1], features)]
        if names[0] != names[1]:
            raise CommandError(
                f"{first[0].relative_to(folder)} and {path.relative_to(folder)} in {folder} differ in their columns or"
                " label names. Write them with the same features."
            )


def _label_names(feature: Any) -> list[str] | None:
    feature = getattr(feature, "feature", feature)
    return feature.names if isinstance(feature, ClassLabel) else None


def check_one_format(folder: Path) -> None:
    """
    Raises:
        CommandError: If rows of a folder lie in files of several formats, of which `datasets` would read one.
    """
    found = {suffix_of(path): path for path in folder.rglob("*") if path.is_file()}
    readers = {READERS[suffix]: path for suffix, path in found.items() if suffix is not None and suffix != ".txt"}
    if len(readers) > 1:
        examples = ", ".join(str(path.relative_to(folder)) for path in readers.values())
        raise CommandError(f"{folder} has files of several formats ({examples}), of which one only would be read.")
