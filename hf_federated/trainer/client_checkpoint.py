"""What several processes write of a checkpoint: what clients keep, and what they sent and the server still needs."""

from __future__ import annotations

import os
from pathlib import Path

from ..distillation import Teachers
from ..distributed.process_group import ProcessGroup
from ..engines import Engine


TEACHERS_DIR = "teachers"


def save_clients(directory: Path, engine: Engine, processes: ProcessGroup, label: str) -> dict[str, str]:
    """
    Write what the clients of every process keep. All processes must call it.

    Args:
        directory (`Path`): Which the main process has made.
        engine ([`Engine`]): Whose clients they are.
        processes ([`ProcessGroup`]): Of the launch.
        label (`str`): Where in the program this process is.

    Returns:
        `dict[str, str]`: The digests of all processes' files, by client, sorted.

    Raises:
        FileNotFoundError: If this process does not see the directory.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{os.fspath(directory)!r}, which the main process made, is not to be seen from process "
            f"{processes.rank}: `output_dir` must lie on a file system that all processes share."
        )
    return _together(processes, label, engine.save(directory))


def save_teachers(
    directory: Path, teachers: Teachers | None, processes: ProcessGroup, spreads_clients: bool
) -> dict[str, str]:
    """
    Write what clients sent and the server still needs. All processes must call it.

    Args:
        directory (`Path`): That of what clients keep, in which this is a folder.
        teachers ([`Teachers`], *optional*): Those of this process.
        processes ([`ProcessGroup`]): Of the launch.
        spreads_clients (`bool`): Whether each process has teachers of its own, and not all the same.

    Returns:
        `dict[str, str]`: The digests of all processes' files, by client, sorted; empty without teachers.
    """
    if teachers is None:
        return {}
    writes = spreads_clients or processes.is_main
    (directory / TEACHERS_DIR).mkdir(exist_ok=True)
    own = teachers.save(directory / TEACHERS_DIR) if writes else {}
    return _together(processes, "what clients sent", own)


def load_teachers(
    directory: Path, digests: dict[str, str], teachers: Teachers | None, processes: ProcessGroup, spreads_clients: bool
) -> None:
    """
    Read what `save_teachers` wrote.

    Args:
        directory, teachers, processes, spreads_clients: As there.
        digests (`dict[str, str]`): What it returned.
    """
    # Of processes that train clients of their own the first has all of them, until they send anew.
    if teachers is not None and (processes.is_main or not spreads_clients):
        teachers.load(directory / TEACHERS_DIR, digests)


def _together(processes: ProcessGroup, label: str, own: dict[str, str]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for theirs in processes.gather(label, own):
        digests |= theirs
    return dict(sorted(digests.items()))
