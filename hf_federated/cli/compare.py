"""`hf-federated compare`: compare runs in one table and one picture."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.text import aligned_rows
from hf_federated.reporting.comparison import Comparison
from hf_federated.reporting.saved_run import SavedRun, read_saved_run
from hf_federated.utils.printable import printable


_MAX_CELL = 40


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("folders", metavar="DIR", nargs="+", help="output folders of two or more runs")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="write the comparison to FILE.html, or to FILE.md with its picture in FILE.svg, instead of printing it",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric of the picture, such as accuracy (default: metric_for_best_model, or the first metric)",
    )


def compare(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If a folder contains no run, a file is damaged, no run has the metric, or the output cannot be
            written.
    """
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and output.suffix not in (".html", ".md"):
        raise CommandError(f"--output is {arguments.output}, but the name must end in .html or .md.")
    with command_errors("compare"):
        comparison = Comparison(_read(arguments.folders), arguments.metric)
    if output is None:
        lines = aligned_rows([[printable(cell, _MAX_CELL) for cell in row] for row in comparison.to_text()])
        print("\n".join([*lines, "", "The values with * are best."]))
        return
    with command_errors(f"--output {arguments.output}"):
        for path in _write(comparison, output):
            print(f"The comparison is in {path}.")


def _read(folders: Sequence[str]) -> list[SavedRun]:
    """Read the runs. Folders with the same name are named by the last parts of their paths."""
    paths = [str(Path(folder).resolve()) for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise CommandError(f"{folder} is given twice. Name each run once.")
    names = [Path(path).name for path in paths]
    if len(set(names)) < len(names):
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, common) for path in paths]
    runs = []
    for folder, name in zip(folders, names, strict=True):
        with command_errors(folder):
            runs.append(read_saved_run(folder, name))
    return runs


def _write(comparison: Comparison, output: Path) -> list[Path]:
    if output.suffix == ".html":
        output.write_text(comparison.to_html(), encoding="utf-8")
        return [output]
    picture = output.with_suffix(".svg")
    content = comparison.to_svg()
    if content is not None:
        picture.write_text(content, encoding="utf-8")
    output.write_text(comparison.to_markdown(None if content is None else picture.name), encoding="utf-8")
    return [output] if content is None else [output, picture]
