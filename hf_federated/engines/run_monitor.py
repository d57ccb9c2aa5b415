"""`RunMonitor`: the files with which an operator watches and controls a federation over a network.

The server writes `network/status.json` in its output directory every second. It reads `network/expelled.json`, which
`hf-federated expel` writes. Only users who can write to the output directory control the run.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..utils.printable import printable
from ..utils.run_files import EXPELLED_NAME, STATUS_NAME
from ..utils.run_files import NETWORK_FOLDER as FOLDER
from ..utils.storage import write_private
from ..utils.untrusted_json import read_json


logger = logging.get_logger(__name__)

INTERVAL = 1.0
# Seconds without an update after which the server no longer runs.
STALE_SECONDS = 30.0


class RunMonitor:
    """
    Writes the status of a run, and reads which clients the operator has expelled.

    Args:
        output_dir (`pathlib.Path`): Output directory of the server.
        snapshot (`Callable[[], dict[str, Any]]`): Returns the status, in any thread.
    """

    def __init__(self, output_dir: Path, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._folder = output_dir / FOLDER
        self._snapshot = snapshot
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="run-monitor", daemon=True)

    def start(self) -> None:
        """Start to write the status."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write("running")
        self._thread.start()

    def stop(self, state: str) -> None:
        """Write the last status. `state` is how the run ended, such as `"complete"`."""
        self._ended.set()
        self._thread.join()
        self._write(state)

    def expelled(self) -> list[str]:
        """The ids of the clients that the operator has expelled."""
        try:
            return read_expelled(self._folder.parent)
        except ValueError as error:
            logger.warning(f"Ignored {EXPELLED_NAME}: {error}")
            return []

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._write("running")

    def _write(self, state: str) -> None:
        status = {"state": state, "updated_at": time.time(), "process": os.getpid(), **self._snapshot()}
        try:
            _replace(self._folder / STATUS_NAME, status)
        except OSError as error:
            # A full disk must not end the run.
            logger.warning(f"The status of the run cannot be written: {error}")


def read_status(output_dir: Path) -> dict[str, Any]:
    """
    Read the last status of a run.

    Args:
        output_dir (`pathlib.Path`): Output directory of the server.

    Raises:
        FileNotFoundError: If no server has written a status.
        ValueError: If the file is damaged.
    """
    status = read_json(output_dir / FOLDER / STATUS_NAME)
    if not isinstance(status, dict) or not isinstance(status.get("clients"), dict):
        raise ValueError(f"{output_dir / FOLDER / STATUS_NAME} is not the status of a run.")
    return status


def seconds_without_update(status: dict[str, Any]) -> float | None:
    """Seconds since the last update of a run whose server has ended or hangs. `None` for a server that runs."""
    age = time.time() - status["updated_at"]
    return age if status["state"] == "running" and age > STALE_SECONDS else None


def read_expelled(output_dir: Path) -> list[str]:
    """
    Read the ids of the clients that the operator has expelled.

    Args:
        output_dir (`pathlib.Path`): Output directory of the server.

    Raises:
        ValueError: If the file is damaged.
    """
    path = output_dir / FOLDER / EXPELLED_NAME
    if not path.is_file():
        return []
    names = read_json(path)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} must be a list of client ids.")
    return names


def expel_client(output_dir: Path, client_id: str) -> None:
    """
    Tell a running server to expel a client. The client cannot join again, also after a resume.

    Args:
        output_dir (`pathlib.Path`): Output directory of the server.
        client_id (`str`): Id of the client.

    Raises:
        FileNotFoundError: If no server has written a status.
        ValueError: If the run has no client with this id, or has ended.
    """
    status = read_status(output_dir)
    clients, state = status["clients"], status["state"]
    if client_id not in clients:
        raise ValueError(f"the run has no client {client_id!r}. Its clients are {', '.join(clients)}.")
    if state != "running":
        advice = "" if state == "complete" else " Start the server with --resume, and expel the client then."
        raise ValueError(f"the run has ended ({printable(state)}), so no client can be expelled.{advice}")
    names = dict.fromkeys([*read_expelled(output_dir), client_id])
    _replace(output_dir / FOLDER / EXPELLED_NAME, list(names))


def readmit_clients(output_dir: Path) -> None:
    """
    Let the expelled clients join the next run.

    Args:
        output_dir (`pathlib.Path`): Output directory of the server.
    """
    (output_dir / FOLDER / EXPELLED_NAME).unlink(missing_ok=True)


def _replace(path: Path, content: Any) -> None:
    write_private(path, (json.dumps(content, indent=2) + "\n").encode())
