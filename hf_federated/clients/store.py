"""Storage of the state that clients keep between rounds: optimizer states, control variates, local models.

The state belongs to its client and is never sent to the server. The state of one simulated client is a tree of scalars
and tensors under the client id. The stores, in memory and on disk, write the same checkpoint format: one packed file
per client.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..messages.serialization import MAX_FILE_TENSORS, pack, unpack
from ..utils.file_hash import sha256_of_file
from ..utils.meta_tensors import to_cpu
from ..utils.storage import StorageError, storage_errors, write_private


SUFFIX = ".safetensors"


def client_file_name(client_id: str) -> str:
    """Return the name of a client's file in a store."""
    # Any string is a valid client id, but not every string is a valid file name. The file contains the id.
    return hashlib.sha256(client_id.encode()).hexdigest()[:32] + SUFFIX


def _pack(client_id: str, state: dict[str, Any]) -> bytes:
    return pack({"client_id": client_id, "state": state})


def _read_state(path: Path) -> dict[str, Any]:
    tree = unpack(path.read_bytes(), MAX_FILE_TENSORS)
    state = tree.get("state") if isinstance(tree, dict) else None
    if not isinstance(state, dict):
        raise ValueError("The file is damaged or is not the state of a client. Resume from a checkpoint.")
    return state


class ClientStore(ABC):
    """
    Storage for the state of every client, by client id.

    Attributes:
        num_changes (`int`, *optional*): Number of changes so far. It is larger after each `set`, `remove`, `clear` and
            `load`. `None` if the store does not count its changes.
    """

    num_changes: int | None = None

    @abstractmethod
    def get(self, client_id: str) -> dict[str, Any]:
        """Return a copy of a client's state, or `{}` if there is none. Changes of the copy do not change the store."""

    @abstractmethod
    def set(self, client_id: str, state: dict[str, Any]) -> None:
        """Replace a client's state. The caller must not use the tensors in `state` afterwards."""

    @abstractmethod
    def remove(self, client_id: str) -> None:
        """Delete the state of a client."""

    @abstractmethod
    def __contains__(self, client_id: object) -> bool:
        """Whether the store has a state for a client."""

    @abstractmethod
    def clear(self) -> None:
        """Delete the states of all clients."""

    @abstractmethod
    def save(self, directory: Path) -> dict[str, str]:
        """
        Write all states into a directory, one file per client.

        Returns:
            `dict[str, str]`: The SHA-256 digest of each client's file, by client id.
        """

    @abstractmethod
    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """
        Replace all states with states that `save` wrote into a directory.

        Args:
            directory (`pathlib.Path`): A directory written by `save`. Several stores of any kind may have written
                their clients into it.
            digests (`Mapping[str, str]`): Ids of the clients to read, with the digests that `save` returned.

        Raises:
            ValueError: If a file is missing or its digest differs. The message names the client.
        """


class MemoryStore(ClientStore):
    """
    Client states in memory. This store is the fastest; it needs memory for the states of all clients.

    Example:

    ```python
    >>> from hf_federated.clients import MemoryStore

    >>> store = MemoryStore()
    >>> store.set("a", {"step": 1})
    >>> store.get("a"), store.get("b")
    ({'step': 1}, {})
    ```
    """

    def __init__(self) -> None:
        self.num_changes: int = 0
        self._states: dict[str, dict[str, Any]] = {}

    def get(self, client_id: str) -> dict[str, Any]:
        state = self._states.get(client_id)
        # Most clients keep nothing.
        return _map_tensors(state, torch.clone) if state else {}

    def set(self, client_id: str, state: dict[str, Any]) -> None:
        self.num_changes += 1
        # Keep the memory of the accelerator free for the client that trains.
        self._states[client_id] = _map_tensors(state, to_cpu)

    def remove(self, client_id: str) -> None:
        self.num_changes += 1
        self._states.pop(client_id, None)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._states

    def clear(self) -> None:
        self.num_changes += 1
        self._states = {}

    def save(self, directory: Path) -> dict[str, str]:
        digests: dict[str, str] = {}
        for client_id, state in self._states.items():
            blob = _pack(client_id, state)
            write_private(directory / client_file_name(client_id), blob)
            digests[client_id] = hashlib.sha256(blob).hexdigest()
        return digests

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        self.num_changes += 1
        files = {client_id: _checked_file(directory, client_id, digest) for client_id, digest in digests.items()}
        self._states = {client_id: _read_state(path) for client_id, path in files.items()}


class DiskStore(ClientStore):
    """
    Client states on disk, one file per client, for federations whose states do not fit in memory.

    `set` replaces a file as a whole, and no file is modified in place. A checkpoint can therefore hold hard links to
    the files instead of copies.

    Args:
        directory (`str` or `os.PathLike`): Directory of the files. `clear` deletes the directory with all of its
            contents.

    Raises:
        OSError: If a file cannot be written or read. The message names the file.

    Example:

    ```python
    >>> import tempfile
    >>> from hf_federated.clients import DiskStore

    >>> store = DiskStore(tempfile.mkdtemp())
    >>> store.set("a", {"step": 1})
    >>> store.get("a")
    {'step': 1}
    ```
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.num_changes: int = 0
        # Digest of each client's file; `None` if it has not been computed since the file was written.
        self._digests: dict[str, str | None] = {}

    def get(self, client_id: str) -> dict[str, Any]:
        path = self.directory / client_file_name(client_id)
        with _name_file_in_errors(path):
            return _read_state(path) if path.exists() else {}

    def set(self, client_id: str, state: dict[str, Any]) -> None:
        self.num_changes += 1
        path = self.directory / client_file_name(client_id)
        blob = _pack(client_id, state)
        advice = "With client_store='memory', the states of clients need no disk."
        with _name_file_in_errors(path), storage_errors(self.directory, lambda: len(blob), advice):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_private(path, blob)
        self._digests[client_id] = None

    def remove(self, client_id: str) -> None:
        self.num_changes += 1
        (self.directory / client_file_name(client_id)).unlink(missing_ok=True)
        self._digests.pop(client_id, None)

    def __contains__(self, client_id: object) -> bool:
        return isinstance(client_id, str) and (self.directory / client_file_name(client_id)).exists()

    def clear(self) -> None:
        self.num_changes += 1
        shutil.rmtree(self.directory, ignore_errors=True)
        self._digests = {}

    def save(self, directory: Path) -> dict[str, str]:
        digests: dict[str, str] = {}
        for client_id, digest in self._digests.items():
            path = self.directory / client_file_name(client_id)
            link_or_copy(path, directory / path.name)
            digests[client_id] = sha256_of_file(path) if digest is None else digest
        self._digests.update(digests)
        return digests

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        self.clear()  # counts a change
        self.directory.mkdir(parents=True)
        for client_id, digest in digests.items():
            path = _checked_file(directory, client_id, digest)
            link_or_copy(path, self.directory / path.name)
        self._digests.update(digests)


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the path of the file to errors. Some errors, such as the error of a full disk, do not name a file."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = (
            f"{error.strerror or error}. The states of clients are stored below `output_dir`. Free disk space there, "
            "choose another `output_dir`, or set client_store='memory'"
        )
        raise OSError(error.errno, reason, os.fspath(path)) from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r}: {error}") from error


def _checked_file(directory: Path, client_id: str, digest: str) -> Path:
    path = directory / client_file_name(client_id)
    if not path.is_file() or sha256_of_file(path) != digest:
        reason = "differs from the file that was saved" if path.exists() else "is missing"
        raise ValueError(
            f"The state of client {client_id!r}, {os.fspath(path)!r}, {reason}. The checkpoint is damaged or was "
            "copied incompletely. Copy it again, or resume from another checkpoint."
        )
    return path


def link_or_copy(source: Path, target: Path) -> None:
    """Make a file available under a second path. The file must not change afterwards."""
    try:
        os.link(source, target)
    except OSError:  # The paths are on different file systems, or the file system has no hard links.
        write_private(target, source.read_bytes())


def _map_tensors(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a copy of a tree with a function applied to every tensor."""
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(value, function) for value in tree)
    return function(tree) if isinstance(tree, torch.Tensor) else tree
