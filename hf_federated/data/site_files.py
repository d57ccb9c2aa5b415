"""Find the files of a folder that are sites, and what a reader may not expect of them, to load or to check them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .tables import Table, TableOptions, data_suffix
from .tables.text_format import SEPARATORS, printable_separator


# A file with such a name has the examples of a split, and not of a site.
TEST_NAMES = ("test", "validation", "valid", "val", "dev", "eval")
SPLIT_NAMES = ("train", *TEST_NAMES)
# Number of files that a note names.
MAX_FILES = 3


def data_files(folder: Path) -> list[Path]:
    """The data files of a folder, by their names. Files in subfolders and hidden files are left out."""
    # Hidden files are files of the system, such as `._north.csv` on macOS and `~$north.xlsx` while Excel is open.
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and data_suffix(path) is not None and not path.name.startswith((".", "~$"))
    ]


def site_files(paths: Sequence[Path]) -> tuple[dict[str, Path], list[Path]]:
    """
    Find the file of each site. A workbook with the name of another file was exported to it, and is left out.

    Args:
        paths (`Sequence[Path]`): The data files of a folder, by their names.

    Returns:
        `tuple[dict[str, Path], list[Path]]`: The file of each site, and the other files with the name of a site.
    """
    files: dict[str, Path] = {}
    repeated = []
    for path in paths:
        name = site_name(path)
        if name not in files:
            files[name] = path
        elif path.suffix.lower() != ".xlsx":
            repeated.append(path)
    return files, repeated


def same_site_error(first: Path, second: Path) -> str:
    """The message for two files of one site."""
    return f"{first} and {second} name the same client {site_name(first)}. Rename a file."


def separator_mistake(table: Table, options: TableOptions | None) -> str:
    """The message for a given separator that leaves one column with another separator in its name, otherwise `""`."""
    if options is None or options.separator is None or table.kind != "CSV" or len(table.columns) != 1:
        return ""
    found = next((item for item in SEPARATORS if item != options.separator and item in table.columns[0]), None)
    if found is None:
        return ""
    given, other = map(printable_separator, (options.separator, found))
    return (
        f"{table.path}: with the given separator {given} the file has the only column {table.columns[0]!r}. Its"
        f" separator is probably {other}: give this one, or none, so that it is found from the file."
    )


def site_name(path: Path) -> str:
    """The name of a file up to its data suffix, such as `st. mary` for `st. mary.csv.gz`."""
    suffix = data_suffix(path)
    position = max((n for n, item in enumerate(path.suffixes) if item.lower() == suffix), default=len(path.suffixes))
    return path.name.removesuffix("".join(path.suffixes[position:]))


def noted_files(notes: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """
    Return each note once, after the names of its files.

    Args:
        notes (`Iterable[tuple[str, Sequence[str]]]`): The name of each file, and its notes.
    """
    names: dict[str, list[str]] = {}
    for name, sentences in notes:
        for sentence in sentences:
            names.setdefault(sentence, []).append(name)
    lines = []
    for sentence, files in names.items():
        num_more = len(files) - MAX_FILES
        more = "" if num_more < 1 else f" and {num_more} more file{'s' if num_more > 1 else ''}"
        lines.append(f"{', '.join(files[:MAX_FILES])}{more}: {sentence}")
    return lines
