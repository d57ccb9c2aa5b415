"""`hf-federated split-server` and `split-client`: train a recipe with a split model on several machines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_federated.cli.recipe_options import add_recipe_arguments


# `hf_federated.transport.protocol.DEFAULT_MAX_MESSAGE_BYTES`, without its import.
MAX_MESSAGE_BYTES = 1 << 30


def add_server_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of `split-server` to a parser."""
    _add_common_arguments(parser)
    parser.add_argument("--address", default="127.0.0.1:50051", help="address of the server (default: %(default)s)")
    parser.add_argument(
        "--client",
        metavar="ID",
        action="append",
        required=True,
        help="id of a client; repeat the option for each client, in the order of the clients",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="how long a step waits for its clients before it continues without them",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=60.0,
        help="seconds without a heartbeat after which a client is lost (default: %(default)s)",
    )


def add_client_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of `split-client` to a parser."""
    _add_common_arguments(parser)
    parser.add_argument("--client", metavar="ID", required=True, help="id of this client")
    parser.add_argument(
        "--address", required=True, help="address of the server, with the host name of its certificate: host:port"
    )
    parser.add_argument(
        "--rows",
        metavar="PATH",
        help="dataset of this client, with the splits of the recipe (default: its part of the recipe's partition)",
    )
    parser.add_argument(
        "--server-fingerprint",
        metavar="FINGERPRINT",
        help="fingerprint of the server for split.encryption, if its certificate is not in the folder",
    )
    parser.add_argument(
        "--connect-timeout",
        type=float,
        metavar="SECONDS",
        default=60.0,
        help="how long to wait for the server to start (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the latest step for which all parties have a checkpoint"
    )


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both commands to a parser. All parties pass the same recipe and the same `--set`."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--certificates", metavar="DIR", required=True, help="folder with ca.pem, and the .pem and .key of this party"
    )
    parser.add_argument(
        "--peer",
        metavar="ID=FINGERPRINT",
        action="append",
        default=[],
        help="fingerprint of a client whose certificate is not in the folder; can be repeated",
    )
    parser.add_argument(
        "--max-message-bytes",
        type=int,
        metavar="BYTES",
        default=MAX_MESSAGE_BYTES,
        help="size of the largest accepted message (default: 1 GiB)",
    )


def split_server(arguments: argparse.Namespace) -> None:
    """
    Execute the command `split-server`: serve a run until it ends.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_server_arguments`].

    Raises:
        CommandError: If the recipe, the certificates or the address cannot be used, or the run failed.
    """
    from hf_federated.experiments import networked_split

    networked_split.split_server(arguments)


def split_client(arguments: argparse.Namespace) -> None:
    """
    Execute the command `split-client`: train as one client of a run until it ends.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_client_arguments`].

    Raises:
        CommandError: If the recipe, the dataset or the certificates cannot be used, or the run failed.
    """
    from hf_federated.experiments import networked_split

    networked_split.split_client(arguments)
