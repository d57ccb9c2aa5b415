"""`hf-federated serve` and `join`: train a recipe whose clients are on other machines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_federated.cli.recipe_options import (
    add_existing_run_options,
    add_recipe_arguments,
    make_current_folder_importable,
)
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.recipe.early_checks import check_early, output_folder
from hf_federated.experiments.recipe.fields import check_names
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.utils.client_names import escape_client_id


# `hf_federated.transport.protocol.DEFAULT_MAX_MESSAGE_BYTES`, without its import.
MAX_MESSAGE_BYTES = 1 << 30
# Name of the folder of the server.
SERVER_NAME = "server"
# Options that only recipes without, or with, a section `split` use.
WITHOUT_SPLIT = ("insecure", "test_examples", "num_to_start", "overwrite", "dry_run")
WITH_SPLIT = ("peer", "server_fingerprint")


def add_serve_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of `serve` to a parser."""
    _add_common_arguments(parser)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address to listen on (default: network.address of the recipe, or else 0.0.0.0:50051)",
    )
    parser.add_argument(
        "--client",
        metavar="ID",
        dest="clients",
        action="append",
        default=[],
        help="id of a client; repeat the option for each client, in the order of the clients (default: network.clients"
        " of the recipe)",
    )
    parser.add_argument(
        "--test-examples",
        metavar="PATH",
        help="file, folder or Hub id with the test examples of the server (default: data.test_path of the recipe)",
    )
    parser.add_argument(
        "--num-to-start",
        type=int,
        metavar="N",
        help="number of clients that must have joined before the first round (default: all)",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="how long a round, or a step of a split model, waits for its clients before it continues without them",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        metavar="SECONDS",
        help="seconds without a sign of a client after which the client is lost (default: 60)",
    )
    add_existing_run_options(
        parser,
        resume="continue the run in the output folder from its last checkpoint, or start it if there is none; a split"
        " model resumes if its clients do",
    )


def add_join_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add the arguments of `join` to a parser."""
    _add_common_arguments(parser)
    parser.add_argument("--client", metavar="ID", required=True, help="id of this client")
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of the server, with the host name of its certificate (default: network.address of the recipe)",
    )
    parser.add_argument(
        "--examples",
        "--rows",
        metavar="PATH",
        dest="examples",
        help="file, folder or Hub id with the examples of this client, with the splits of the recipe (default: its"
        " part of the recipe's dataset)",
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
        default=600.0,
        help="how long to try to reach the server (default: %(default)s)",
    )
    parser.add_argument(
        "--refusals",
        type=int,
        metavar="N",
        default=3,
        help="number of refused requests after which the client leaves (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the client agrees to, without a connection; not for split models",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="for a split model: resume from the latest step for which all parties have a checkpoint; other clients"
        " always continue with their last state",
    )


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both commands to a parser. All parties pass the same recipe and the same `--set`."""
    add_recipe_arguments(parser)
    parser.add_argument(
        "--certificates", metavar="DIR", help="folder with ca.pem, and the .pem and .key of this party"
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="use no certificates and no TLS; allowed on a loopback address only, and not for split models",
    )
    parser.add_argument(
        "--peer",
        metavar="ID=FINGERPRINT",
        action="append",
        default=[],
        help="fingerprint of a client for split.encryption or secure aggregation, if its certificate is not in the"
        " folder; can be repeated",
    )
    parser.add_argument(
        "--max-message-bytes",
        type=int,
        metavar="BYTES",
        default=MAX_MESSAGE_BYTES,
        help="size of the largest accepted message (default: 1 GiB)",
    )
    parser.add_argument(
        "--log-format",
        choices=["text", "json"],
        default="text",
        help="format of the log on standard error; json writes one JSON object per line (default: %(default)s)",
    )


def serve(arguments: argparse.Namespace) -> None:
    """
    Execute the command `serve`: run the rounds, or the server's blocks of a split model, until the run ends.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_serve_arguments`].

    Raises:
        CommandError: If the recipe, the certificates or the address cannot be used, or the run failed.
    """
    if _has_split(arguments, SERVER_NAME):
        from hf_federated.experiments.network.split_run import split_server as run
    else:
        from hf_federated.experiments.network.commands import serve as run
    run(arguments)


def join(arguments: argparse.Namespace) -> None:
    """
    Execute the command `join`: take part in a run as one client until it ends.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of [`add_join_arguments`].

    Raises:
        CommandError: If the recipe, the examples or the certificates cannot be used, or the run failed.
    """
    if _has_split(arguments, arguments.client):
        from hf_federated.experiments.network.split_run import split_client as run
    else:
        from hf_federated.experiments.network.commands import join as run
    run(arguments)


def split_server(arguments: argparse.Namespace) -> None:
    """Execute the deprecated command `split-server`."""
    _warn_of_deprecation("split-server", "serve")
    serve(arguments)


def split_client(arguments: argparse.Namespace) -> None:
    """Execute the deprecated command `split-client`."""
    _warn_of_deprecation("split-client", "join")
    join(arguments)


def _warn_of_deprecation(old: str, new: str) -> None:
    print(
        f"hf-federated: `{old}` is deprecated and will be removed in version 0.3. Use `{new}`, which has the same"
        " options.",
        file=sys.stderr,
    )


def _has_split(arguments: argparse.Namespace, party: str) -> bool:
    """Whether the recipe trains a split model. Mistakes that need no model are reported before slow imports."""
    _check_options(arguments)
    values = read_values(arguments.recipe, arguments.overrides)
    check_names(values)
    path = Path(output_folder(values, arguments.output_dir), escape_client_id(party))
    given = vars(arguments)
    is_server = party == SERVER_NAME
    check_early(values, str(path), not is_server, is_server, given.get("examples"), given.get("test_examples"))
    make_current_folder_importable()
    has_split = values.get("split") is not None
    federation = values.get("federation") or {}
    is_secure = "connect_timeout" in vars(arguments) and federation.get("secure_aggregation") is not None
    for option in WITHOUT_SPLIT if has_split else WITH_SPLIT:
        if getattr(arguments, option, None) and not (option == "peer" and is_secure):
            kind = "for split models" if has_split else "without a section split in the recipe"
            raise CommandError(f"--{option.replace('_', '-')} has no use {kind}. Leave it out.")
    if arguments.log_format == "json":
        from hf_federated.experiments.network.event_log import log_as_json

        log_as_json()
    return has_split


def _check_options(arguments: argparse.Namespace) -> None:
    """Check the options before any file is read."""
    if arguments.insecure == (arguments.certificates is not None):
        raise CommandError("pass either --certificates DIR, from `hf-federated certificates`, or --insecure.")
    for name in ("max_message_bytes", "deadline", "heartbeat_timeout", "connect_timeout", "refusals"):
        value = getattr(arguments, name, None)
        if value is not None and not value > 0:
            raise CommandError(f"--{name.replace('_', '-')} is {value}, but must be more than 0.")
    if arguments.certificates is not None and not Path(arguments.certificates).is_dir():
        raise CommandError(f"--certificates: the folder {arguments.certificates} does not exist.")
    if arguments.peer or getattr(arguments, "server_fingerprint", None):
        from hf_federated.experiments.network.fingerprints import check_fingerprints

        check_fingerprints(arguments)
