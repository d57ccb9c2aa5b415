"""`ClientStates`: which state each client on another machine has, in the checkpoints of its server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..clients.store import client_file_name
from ..utils.file_hash import sha256_of_file
from ..utils.storage import write_private
from ..utils.untrusted_json import read_json


class ClientStates:
    """The name of each client's state after its last reply. It is the name of the request."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        # The names after the last round whose result is on disk.
        self._recorded: dict[str, str] = {}

    def record(self) -> dict[str, str]:
        """Return the names. The clients keep these states until the next call."""
        self._recorded = dict(self.names)
        return dict(self.names)

    def recorded_of(self, client_id: str) -> list[str]:
        """Return the name of a client's state in the last call of `record`, if there is one."""
        return [self._recorded[client_id]] if client_id in self._recorded else []

    def of(self, client_id: str) -> str:
        """Return the name of a client's state. Empty before the first reply of the client."""
        return self.names.get(client_id, "")

    def save(self, directory: Path, num_outcomes: int) -> dict[str, str]:
        """
        Write the names to a checkpoint.

        Args:
            directory (`pathlib.Path`): Directory of the client states.
            num_outcomes (`int`): Number of outcomes of requests that the run has used.

        Returns:
            `dict[str, str]`: SHA-256 of each client's file, by client id.
        """
        digests = {}
        for client_id, state in self.names.items():
            content = json.dumps({"client": client_id, "state": state, "outcomes": num_outcomes}).encode()
            write_private(directory / client_file_name(client_id), content)
            digests[client_id] = hashlib.sha256(content).hexdigest()
        return digests

    def load(self, directory: Path, digests: Mapping[str, str]) -> int | None:
        """
        Read the names of a checkpoint.

        Args:
            directory (`pathlib.Path`): Directory of the client states.
            digests (`Mapping[str, str]`): Return value of `save`.

        Returns:
            `int`, *optional*: Number of outcomes of requests that the run had used. `None` for a checkpoint of an
            earlier version.

        Raises:
            ValueError: If a client's file is missing or differs from the saved file.
        """
        self.names = {}
        num_outcomes: int | None = 0
        for client_id, digest in digests.items():
            path = directory / client_file_name(client_id)
            content = _read(directory, client_id)
            if "state" not in content or sha256_of_file(path) != digest:
                raise ValueError(
                    f"The state of client {client_id!r}, {str(path)!r}, is missing or damaged, or the checkpoint was "
                    "written by an engine whose clients run on one machine. Resume with the engine of the checkpoint."
                )
            self.names[client_id] = content["state"]
            num_outcomes = content.get("outcomes")
        return num_outcomes


def saved_names(directories: Sequence[Path], client_id: str) -> list[str]:
    """
    Return the names of a client's state in checkpoints, without the checkpoints that have none.

    Args:
        directories (`Sequence[pathlib.Path]`): Directories of the client states.
        client_id (`str`): Id of the client.
    """
    contents = [_read(directory, client_id) for directory in directories]
    return [content["state"] for content in contents if "state" in content]


def _read(directory: Path, client_id: str) -> dict[str, Any]:
    """Read a client's file in a checkpoint. The result is empty if the file is missing or damaged."""
    try:
        content = read_json(directory / client_file_name(client_id))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("state"), str) else {}
