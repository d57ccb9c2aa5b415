"""Files of sites with planted faults."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from hf_federated.cli.main import main


SITES = ("north", "south", "east", "west")


def clean_rows(site: str, num_rows: int = 30) -> list[list[str]]:
    """Rows of a text that occurs once and one of two labels."""
    return [[f"the pump {number} of {site} leaks", "defect" if number % 2 else "fine"] for number in range(num_rows)]


def write_csv(path: Path, rows: list[list[str]], header: tuple[str, ...] = ("text", "label")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def write_sites(folder: Path, **changed: list[list[str]]) -> Path:
    """A folder with a CSV file for each site. Line 2 of a file is its first row."""
    for site, rows in ({site: clean_rows(site) for site in SITES} | changed).items():
        write_csv(folder / f"{site}.csv", rows)
    return folder


def with_cells(site: str, **cells: str) -> list[list[str]]:
    """The rows of a site with other texts (`text_LINE`) or labels (`label_LINE`), by the line of the file."""
    rows = clean_rows(site)
    for name, value in cells.items():
        column, line = name.split("_")
        rows[int(line) - 2][column == "label"] = value
    return rows


def check(capsys: Any, *arguments: str) -> tuple[int, str]:
    """Run `hf-federated check`, and return its exit code and its output."""
    code = main(["check", *arguments])
    return code, capsys.readouterr().out
