"""The commands `hf-federated serve` and `hf-federated join` for averaging and distillation."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from hf_federated.engines import NetworkEngine
from hf_federated.engines.run_monitor import readmit_clients
from hf_federated.experiments.errors import CommandError, command_errors
from hf_federated.experiments.library_messages import without_idle_messages
from hf_federated.experiments.network.event_log import log_events
from hf_federated.experiments.network.fingerprints import parse_peer
from hf_federated.experiments.network.run import (
    build_client,
    build_engine,
    build_server,
    party_folder,
    serve_run,
)
from hf_federated.experiments.recipe.recipe import Recipe, parse_recipe
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.experiments.run_folder import RunFolder
from hf_federated.trainer.checkpoint import list_checkpoints
from hf_federated.transport import TlsCredentials
from hf_federated.utils.storage import StorageError, storage_errors


def serve(arguments: argparse.Namespace) -> None:
    """
    Run the rounds of a recipe with clients on other machines.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of the command `serve`.

    Raises:
        CommandError: If the recipe, the certificates or the address cannot be used.
        RoundFailedError: If a round got too few updates.
    """
    recipe, values = _load(arguments)
    if arguments.deadline is not None:
        recipe.federation["round_deadline"] = arguments.deadline
    path = party_folder(recipe, "server", arguments.output_dir)
    # A supervisor starts the server with --resume each time, also before the first checkpoint.
    resume = arguments.resume and bool(list_checkpoints(Path(path)))
    folder = RunFolder(path, values, resume, arguments.overwrite or (arguments.resume and not resume))
    if arguments.overwrite:
        readmit_clients(Path(path))
    with command_errors("serve"):
        engine = build_engine(
            recipe,
            clients=arguments.clients or None,
            certificates=arguments.certificates,
            address=arguments.address,
            insecure=arguments.insecure,
            num_to_start=arguments.num_to_start,
            heartbeat_timeout=arguments.heartbeat_timeout,
            max_message_bytes=arguments.max_message_bytes,
        )
    with storage_errors(path), without_idle_messages():
        _serve(recipe, engine, arguments, folder)


def _serve(recipe: Recipe, engine: NetworkEngine, arguments: argparse.Namespace, folder: RunFolder) -> None:
    run = build_server(recipe, engine, arguments.output_dir, arguments.test_examples)
    if run.data.test is None:
        print("The server has no test examples, so it does not evaluate. --test-examples names a file or folder.")
    if arguments.log_format == "json":
        log_events(run.trainer)
    try:
        serve_run(run, folder)
    except StorageError:
        raise
    except OSError as error:  # the address is in use, or too few clients joined
        raise CommandError(f"serve: {' '.join(str(error).split())}") from error


def join(arguments: argparse.Namespace) -> None:
    """
    Take part in a recipe as one client, until the server ends the run.

    Args:
        arguments (`argparse.Namespace`): The parsed arguments of the command `join`.

    Raises:
        CommandError: If the recipe, the examples or the certificates cannot be used.
        LinkError: If the server refuses the client, or the connection ended.
        RunEndedError: If the server ended the run because of an error.
    """
    recipe, _ = _load(arguments)
    address = arguments.address or recipe.network.address
    if address is None and not arguments.dry_run:
        raise CommandError("the address of the server is not known. Pass --address, or set network.address.")
    with command_errors("--certificates"):
        if arguments.certificates is not None:
            TlsCredentials.of_client(arguments.certificates, arguments.client)
    with storage_errors(party_folder(recipe, arguments.client, arguments.output_dir)), without_idle_messages():
        _join(recipe, address or "", arguments)


def _join(recipe: Recipe, address: str, arguments: argparse.Namespace) -> None:
    run = build_client(recipe, arguments.client, arguments.output_dir, arguments.examples)
    if arguments.dry_run:
        print(f"Client {arguments.client!r} agrees to:")
        agreement = run.trainer.agreement(
            arguments.client, certificates=arguments.certificates, fingerprints=dict(map(parse_peer, arguments.peer))
        )
        for topic, text in agreement.items():
            print(f"  {topic}: {text}")
        return
    if arguments.log_format == "json":
        log_events(run.trainer)
    # A stop of the machine or of its container disconnects the client like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run.trainer.join(
        address,
        client_id=arguments.client,
        certificates=arguments.certificates,
        insecure=arguments.insecure,
        connect_timeout=arguments.connect_timeout,
        max_message_bytes=arguments.max_message_bytes,
        refusals=arguments.refusals,
        fingerprints=dict(map(parse_peer, arguments.peer)),
    )
    print(f"Client {arguments.client!r} took part in {run.trainer.state.global_step} rounds. The run is complete.")


def _load(arguments: argparse.Namespace) -> tuple[Recipe, dict[str, Any]]:
    values = read_values(arguments.recipe, arguments.overrides)
    return parse_recipe(values), values
