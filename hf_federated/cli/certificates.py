"""`hf-federated certificates`: who may speak with the server of a split model, and who the server is."""

from __future__ import annotations

import argparse
from pathlib import Path

from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.security.certificates import create_certificates
from hf_federated.security.keys import DEFAULT_RSA_BITS, fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("folder", metavar="DIR", help="where the certificates and keys are written")
    parser.add_argument(
        "--server",
        metavar="NAME",
        action="append",
        default=[],
        help="a host name or IP address under which clients reach the server; may be repeated",
    )
    parser.add_argument("--client", metavar="ID", action="append", default=[], help="a client's id; may be repeated")
    parser.add_argument("--days", type=int, default=365, help="how long they are good for (default: %(default)s)")
    parser.add_argument(
        "--ca-days", type=int, default=3650, help="how long a new authority is good for (default: %(default)s)"
    )
    parser.add_argument(
        "--rsa-bits", type=int, default=DEFAULT_RSA_BITS, help="size of the keys (default: %(default)s)"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the server's and clients' certificates and keys; never the authority",
    )


def certificates(arguments: argparse.Namespace) -> None:
    """
    Carries the command out.

    Raises:
        CommandError: If a name is not allowed, or a file is there already.
    """
    if not arguments.server and not arguments.client:
        raise CommandError(
            "say what to make: --server NAME for each of the server's names, --client ID for each client."
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
            raise CommandError(f"{error} (--overwrite)") from error
    for path in written:
        print(f"{path}  {fingerprint(path.read_bytes())}")
    authority = Path(arguments.folder) / "ca.pem"
    print(
        f"\nGive each party {authority}, its own .pem and .key and no other's; clients also the server's fingerprint."
        f"\nKeep {authority.with_suffix('.key')} to yourself: who has it can make clients."
    )
