"""`hf-federated status` and `expel`: watch and control a server that runs on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.utils.printable import printable


def add_status_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of `status` to a parser."""
    _add_folder(parser)
    parser.add_argument("--json", action="store_true", help="print the status as JSON")


def add_expel_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of `expel` to a parser."""
    _add_folder(parser)
    parser.add_argument("client", metavar="ID", help="id of the client")


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="output folder of the server, or of all parties")


def status(arguments: argparse.Namespace) -> int:
    """
    Execute the command `status`.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_status_arguments`].

    Returns:
        `int`: `0` if the server runs or the run is complete, else `1`.

    Raises:
        CommandError: If the folder has no status.
    """
    from hf_federated.engines.run_monitor import read_status, seconds_without_update

    with command_errors(arguments.folder):
        found = read_status(_server_folder(arguments.folder))
    if (age := seconds_without_update(found)) is not None:
        found["state"] = f"no update for {age:.0f} s: the server has ended or hangs"
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(_describe(found)))
    return 0 if found["state"] in ("running", "complete") else 1


def expel(arguments: argparse.Namespace) -> None:
    """
    Execute the command `expel`.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_expel_arguments`].

    Raises:
        CommandError: If the folder has no status, the run has no such client, or the run has ended.
    """
    from hf_federated.engines.run_monitor import expel_client, read_status, seconds_without_update

    with command_errors(arguments.folder):
        folder = _server_folder(arguments.folder)
        expel_client(folder, arguments.client)
        age = seconds_without_update(read_status(folder))
    if age is None:
        print(f"The server disconnects client {arguments.client!r} within seconds, and refuses it from then on.")
    else:
        print(
            f"The server has not updated its status for {age:.0f} s: it has ended or hangs. It refuses client"
            f" {arguments.client!r} when it continues, also after a start with --resume."
        )


def _server_folder(folder: str) -> Path:
    from hf_federated.engines.run_monitor import FOLDER, STATUS_NAME

    for path in (Path(folder), Path(folder) / "server"):
        if (path / FOLDER / STATUS_NAME).is_file():
            return path
    raise CommandError(f"{folder} has no status of a server. Pass the output folder of `hf-federated serve`.")


def _describe(found: dict[str, Any]) -> list[str]:
    """Lines with the round and one row per client."""
    progress = "no round has started" if found["round"] is None else f"round {found['round']} of {found['num_rounds']}"
    lines = [f"{printable(found['state'])}: {progress}, {found['phase']}, {found['bytes_per_second'] / 1e6:.1f} MB/s"]
    rows = [("client", "state", "last heard", "examples", "received", "sent")]
    for name, client in found["clients"].items():
        heard, size = client["seconds_since_heard"], client["num_examples"]
        rows.append(
            (
                name,
                client["state"],
                "-" if heard is None else f"{heard:.0f} s ago",
                "-" if size is None else str(size),
                f"{client['bytes_down'] / 1e6:.1f} MB",
                f"{client['bytes_up'] / 1e6:.1f} MB",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines
