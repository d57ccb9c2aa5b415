"""The options `--peer` and `--server-fingerprint`, which pin the certificates of other parties."""

from __future__ import annotations

import argparse

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.security.keys import check_fingerprint


def check_fingerprints(arguments: argparse.Namespace) -> None:
    """
    Check the fingerprints among the options, before any file is loaded.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of the command `serve` or `join`.

    Raises:
        CommandError: If an option does not contain a fingerprint.
    """
    for peer in arguments.peer:
        parse_peer(peer)
    server_fingerprint = getattr(arguments, "server_fingerprint", None)
    if server_fingerprint is not None:
        with command_errors("--server-fingerprint"):
            check_fingerprint(server_fingerprint, "server")


def parse_peer(option: str) -> tuple[str, str]:
    """
    Parse a `--peer` option.

    Args:
        option (`str`): The option, `ID=FINGERPRINT`.

    Returns:
        `tuple[str, str]`: The client id and the fingerprint.

    Raises:
        CommandError: If the option has another form.
    """
    client_id, separator, value = option.rpartition("=")
    if not separator or not client_id:
        raise CommandError(f"--peer {option!r} does not have the form ID=FINGERPRINT.")
    with command_errors(f"--peer {option}"):
        check_fingerprint(value, client_id)
    return client_id, value
