"""`hf-federated check`: find what is wrong in the examples of all sites. The command imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_federated.cli.csv_options import add_csv_options, table_options
from hf_federated.experiments.errors import CommandError, command_errors


if TYPE_CHECKING:
    from hf_federated.data.checks import Report
    from hf_federated.experiments.data.checked_data import CheckedData


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument(
        "data",
        metavar="PATH",
        help="a folder with a file for each site, a file, a federated dataset written by `partition`, or a recipe",
    )
    parser.add_argument(
        "--text-column",
        metavar="COLUMN",
        action="append",
        default=[],
        help="the column of the texts or of lists of words; can be repeated (default: found by its name)",
    )
    parser.add_argument(
        "--label-column", metavar="COLUMN", help="the column of the labels (default: found by its name)"
    )
    parser.add_argument("--site-column", metavar="COLUMN", help="the column with the site of each row")
    parser.add_argument("--test", metavar="PATH", help="a file or folder with the test examples")
    parser.add_argument(
        "--model", metavar="PATH", help="also find texts that this model cuts; loads its tokenizer only"
    )
    parser.add_argument(
        "--max-length", metavar="NUMBER", type=int, help="with --model: number of tokens that training keeps"
    )
    parser.add_argument("--output", metavar="FILE", help="also write the findings to an HTML page with pictures")
    parser.add_argument(
        "--fix",
        metavar="DIR",
        help="write clean files to a new folder: without incomplete rows, with corrected names of sites and labels",
    )
    parser.add_argument("--drop-duplicates", action="store_true", help="with --fix: also drop repeated texts")
    add_csv_options(parser)


def check(arguments: argparse.Namespace) -> int:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Returns:
        `int`: The exit code: `1` if a finding is an error, otherwise `0`.

    Raises:
        CommandError: If the data cannot be found, a column does not exist, or an output cannot be written.
    """
    if arguments.drop_duplicates and arguments.fix is None:
        raise CommandError("--drop-duplicates is only allowed with --fix DIR.")
    if arguments.max_length is not None and arguments.model is None:
        raise CommandError("--max-length is only allowed with --model PATH.")
    from hf_federated.data.checks import examine
    from hf_federated.data.checks.report import report_text
    from hf_federated.experiments.data.checked_data import open_checked_data

    data = open_checked_data(arguments, table_options(arguments))
    with command_errors(arguments.data):
        report = examine(data.tables, data.columns, data.limit)
    print(report_text(report))
    if arguments.output is not None:
        _write_page(arguments, report)
    if arguments.fix is not None:
        _write_clean_files(arguments, data)
    return 1 if report.of_severity("error") else 0


def _write_page(arguments: argparse.Namespace, report: Report) -> None:
    from hf_federated.reporting.data_page import data_page

    path = Path(arguments.output)
    with command_errors(f"--output {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data_page(report, arguments.data), encoding="utf-8")
    print(f"\nWrote {path}.")


def _write_clean_files(arguments: argparse.Namespace, data: CheckedData) -> None:
    from hf_federated.data.checks.clean_files import write_clean_files

    with command_errors(f"--fix {arguments.fix}"):
        changes = write_clean_files(data.tables, data.columns, Path(arguments.fix), arguments.drop_duplicates)
    print("\n" + "\n".join(changes))
