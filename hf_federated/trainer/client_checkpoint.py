"""The parts of a checkpoint that several processes write: the client states and the teachers of a distillation."""

from __future__ import annotations

import os
from pathlib import Path

from ..distillation import Teachers
from ..distributed.process_group import ProcessGroup
from ..engines import Engine


TEACHERS_DIR = "teachers"


def save_clients(directory: Path, engine: Engine, processes: ProcessGroup, label: str) -> dict[str, str]:
    """
    Write the client states of every process. All processes must call this function.

    Args:
        directory (`pathlib.Path`): Directory of the client states, created by the main process.
        engine ([`Engine`]): The engine that runs the clients.
        processes ([`ProcessGroup`]): The processes of the launch.
        label (`str`): Name of this step, for errors.

    Returns:
        `dict[str, str]`: SHA-256 digests of the files of all processes, by client id in sorted order.

    Raises:
        FileNotFoundError: If the directory does not exist in this process.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"The main process created {os.fspath(directory)!r}, but the directory does not exist in process "
            f"{processes.rank}. Set `output_dir` to a directory on a file system that all processes share."
        )
    return _gather_digests(processes, label, engine.save(directory))


def save_teachers(
    directory: Path, teachers: Teachers | None, processes: ProcessGroup, spreads_clients: bool
) -> dict[str, str]:
    """
    Write the models that clients sent and that the server still needs. All processes must call this function.

    Args:
        directory (`pathlib.Path`): Directory of the client states. The teachers are written to a folder inside it.
        teachers ([`Teachers`], *optional*): The teachers of this process.
        processes ([`ProcessGroup`]): The processes of the launch.
        spreads_clients (`bool`): Whether each process trains different clients, and so has different teachers.

    Returns:
        `dict[str, str]`: SHA-256 digests of the files of all processes, by client id in sorted order. Empty without
        teachers.
    """
    if teachers is None:
        return {}
    writes = spreads_clients or processes.is_main
    (directory / TEACHERS_DIR).mkdir(exist_ok=True)
    own = teachers.save(directory / TEACHERS_DIR) if writes else {}
    return _gather_digests(processes, "teachers", own)


def load_teachers(
    directory: Path, digests: dict[str, str], teachers: Teachers | None, processes: ProcessGroup, spreads_clients: bool
) -> None:
    """
    Read the teachers that `save_teachers` wrote.

    Args:
        directory, teachers, processes, spreads_clients: As in `save_teachers`.
        digests (`dict[str, str]`): The return value of `save_teachers`.
    """
    # If the processes train different clients, the main process holds all teachers until the clients send new models.
    if teachers is not None and (processes.is_main or not spreads_clients):
        teachers.load(directory / TEACHERS_DIR, digests)


def _gather_digests(processes: ProcessGroup, label: str, own: dict[str, str]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for part in processes.gather(label, own):
        digests |= part
    return dict(sorted(digests.items()))
