"""`hf-federated certificates`: create the certificates of the server and the clients of a split model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hf_federated.experiments.errors import CommandError, command_errors


# `hf_federated.security.keys.DEFAULT_RSA_BITS`, without its import.
RSA_BITS = 3072


def add_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of the command to a parser."""
    parser.add_argument("folder", metavar="DIR", help="folder for the certificates and keys")
    parser.add_argument(
        "--server",
        metavar="NAME",
        action="append",
        default=[],
        help="a host name or IP address of the server; can be repeated",
    )
    parser.add_argument(
        "--client", metavar="ID", action="append", default=[], help="the id of a client; can be repeated"
    )
    parser.add_argument(
        "--days", type=int, default=365, help="validity of the certificates in days (default: %(default)s)"
    )
    parser.add_argument(
        "--ca-days",
        type=int,
        default=3650,
        help="validity of a new certificate authority in days (default: %(default)s)",
    )
    parser.add_argument(
        "--rsa-bits", type=int, default=RSA_BITS, help="size of the RSA keys in bits (default: %(default)s)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace existing certificates and keys of the server and the clients, but not of the authority",
    )


def certificates(arguments: argparse.Namespace) -> None:
    """
    Execute the command.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_arguments`].

    Raises:
        CommandError: If a name is invalid, or a file exists already.
    """
    from hf_federated.security.certificates import create_certificates
    from hf_federated.security.keys import fingerprint

    if not arguments.server and not arguments.client:
        raise CommandError(
            "no certificate was requested. Pass --server NAME for each name of the server, and --client ID for each"
            " client."
        )
    with command_errors(arguments.folder):
        try:
            written = create_certificates(
                arguments.folder,
                arguments.server,
                arguments.client,
                days=arguments.days,
                ca_days=arguments.ca_days,
                rsa_bits=arguments.rsa_bits,
                overwrite=arguments.overwrite,
            )
        except FileExistsError as error:
            raise CommandError(f"{error} The option is --overwrite.") from error
    for path in written:
        print(f"{path}  {fingerprint(path.read_bytes())}")
    authority = Path(arguments.folder) / "ca.pem"
    print(
        f"\nGive the server and each client {authority} and only their own .pem and .key. Clients also need the"
        " fingerprint of the server, and, for secure aggregation, the fingerprints of the other clients."
        f"\nKeep {authority.with_suffix('.key')} to yourself: its owner can create certificates for new clients."
    )
