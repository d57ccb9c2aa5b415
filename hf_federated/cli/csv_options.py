"""The options of commands that read CSV files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from hf_federated.experiments.errors import CommandError


if TYPE_CHECKING:
    from hf_federated.data.tables import TableOptions


def add_csv_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of [`TableOptions`]."""
    group = parser.add_argument_group("CSV files", "By default these settings are found from each file.")
    group.add_argument("--csv-separator", metavar="CHARACTER", help="the character between two values, or tab")
    group.add_argument("--csv-encoding", metavar="NAME", help="the encoding, such as utf-8, utf-16 or cp1252")
    group.add_argument("--csv-quote", metavar="CHARACTER", help='the character around values, or none (default ")')
    group.add_argument(
        "--csv-decimal",
        choices=[".", ","],
        help="the decimal separator (default: both with the separator ;, otherwise .)",
    )
    group.add_argument(
        "--csv-text-columns", metavar="COLUMN", nargs="+", default=[], help="columns whose numbers stay text, as 007"
    )


def table_options(arguments: argparse.Namespace) -> TableOptions:
    """
    The values of the options.

    Raises:
        CommandError: If a value is invalid.
    """
    from hf_federated.data.tables import TableOptions

    try:
        return TableOptions(
            separator=arguments.csv_separator,
            encoding=arguments.csv_encoding,
            quote=arguments.csv_quote,
            decimal=arguments.csv_decimal,
            text_columns=arguments.csv_text_columns,
        )
    except ValueError as error:
        raise CommandError(f"--csv-{error}") from error
