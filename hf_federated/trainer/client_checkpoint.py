"""The parts of a checkpoint that several processes write: states of clients, and what the server keeps of clients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from ..engines import Engine
from .setup import FederationSetup


TEACHERS_DIR = "teachers"
STEPS_DIR = "steps"


class Saved(Protocol):
    """Entries of clients that a checkpoint contains."""

    def save(self, directory: Path) -> dict[str, str]:
        """Write all entries into a directory, and return the digest of each client's file."""


def save_clients(directory: Path, engine: Engine, setup: FederationSetup, label: str) -> dict[str, str]:
    """
    Write the client states of every process. All processes must call this function.

    Args:
        directory (`pathlib.Path`): Directory of the client states, created by the main process.
        engine ([`Engine`]): The engine that runs the clients.
        setup ([`FederationSetup`]): The arguments of the trainer.
        label (`str`): Name of this step, for errors.

    Returns:
        `dict[str, str]`: SHA-256 digests of the files of all processes, by client id in sorted order. With FSDP2,
        those of this process.

    Raises:
        FileNotFoundError: If the directory does not exist in this process.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"The main process created {os.fspath(directory)!r}, but the directory does not exist in process "
            f"{setup.processes.rank}. Set `output_dir` to a directory on a file system that all processes share."
        )
    return _gather_digests(setup, label, engine.save(directory))


def save_folder(directory: Path, saved: Saved | None, name: str, setup: FederationSetup) -> dict[str, str]:
    """
    Write what the server keeps for each client, such as the clients' models. All processes must call this function.

    Args:
        directory (`pathlib.Path`): Directory of the client states. The files are written to a folder inside it.
        saved (`Saved`, *optional*): What this process keeps: a store, or the teachers of a distillation.
        name (`str`): Name of the folder.
        setup ([`FederationSetup`]): The arguments of the trainer.

    Returns:
        `dict[str, str]`: SHA-256 digests of the files of all processes, by client id in sorted order. Empty if nothing
        is kept.
    """
    if saved is None:
        return {}
    # Processes that train different clients, or hold different shards, keep different entries.
    writes = setup.spreads_clients or setup.is_sharded or setup.processes.is_main
    (directory / name).mkdir(exist_ok=True)
    return _gather_digests(setup, name, saved.save(directory / name) if writes else {})


def _gather_digests(setup: FederationSetup, label: str, own: dict[str, str]) -> dict[str, str]:
    parts = setup.processes.gather(label, own)
    if setup.is_sharded:
        parts = [own]
    return dict(sorted((client_id, digest) for part in parts for client_id, digest in part.items()))
