"""What clients keep between rounds: optimizer state, control variates, later local models.

It belongs to the client and never travels. One simulated client's state is a tree of scalars and tensors under the
client's id. In memory or on disk, a store writes itself into a checkpoint and reads itself back, one packed file a
client.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..messages import pack, unpack


SUFFIX = ".safetensors"


def _file_name(client_id: str) -> str:
    # A digest, since any text is a client id and not every text is a file name; the file holds the id itself.
    return hashlib.sha256(client_id.encode()).hexdigest()[:32] + SUFFIX


def is_stored(directory: Path, client_id: str) -> bool:
    """Whether a directory that a store wrote holds a client's state."""
    return (directory / _file_name(client_id)).exists()


def _pack(client_id: str, state: dict[str, Any]) -> bytes:
    return pack({"client_id": client_id, "state": state})


class ClientStore(ABC):
    """The state of every client, by client id."""

    @abstractmethod
    def get(self, client_id: str) -> dict[str, Any]:
        """A client's tree, `{}` if it keeps nothing. The caller may change it without changing the store."""

    @abstractmethod
    def set(self, client_id: str, state: dict[str, Any]) -> None:
        """Replace a client's tree. The caller gives up the tensors in it."""

    @abstractmethod
    def __contains__(self, client_id: object) -> bool:
        """Whether a client keeps anything."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every client."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write all states into a directory, one file each."""

    @abstractmethod
    def load(self, directory: Path, client_ids: Sequence[str] | None = None) -> None:
        """
        Replace all states by those of a directory that `save` wrote.

        Args:
            directory (`pathlib.Path`): Written by stores of any kind, each with clients of its own.
            client_ids (`Sequence[str]`, *optional*): Whose; all by default.
        """


class MemoryStore(ClientStore):
    """
    States in memory: the fastest, and as large as clients × state.

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
        self._states: dict[str, dict[str, Any]] = {}

    def get(self, client_id: str) -> dict[str, Any]:
        return _map_tensors(self._states.get(client_id, {}), lambda tensor: tensor.clone())

    def set(self, client_id: str, state: dict[str, Any]) -> None:
        # An accelerator's memory is for the one client that trains.
        self._states[client_id] = _map_tensors(state, lambda tensor: tensor.cpu())

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._states

    def clear(self) -> None:
        self._states = {}

    def save(self, directory: Path) -> None:
        for client_id, state in self._states.items():
            (directory / _file_name(client_id)).write_bytes(_pack(client_id, state))

    def load(self, directory: Path, client_ids: Sequence[str] | None = None) -> None:
        trees = [unpack(path.read_bytes()) for path in _files(directory, client_ids)]
        self._states = {tree["client_id"]: tree["state"] for tree in trees}


class DiskStore(ClientStore):
    """
    One file a client, for federations whose states do not fit in memory.

    A file is replaced as a whole and never written to again, so a checkpoint holds hard links to the files of its
    moment and costs no copy.

    Args:
        directory (`str` or `os.PathLike`): Where the files live. What lies there is deleted by `clear`.

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

    def get(self, client_id: str) -> dict[str, Any]:
        path = self.directory / _file_name(client_id)
        return unpack(path.read_bytes())["state"] if path.exists() else {}

    def set(self, client_id: str, state: dict[str, Any]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _file_name(client_id)
        partial = path.with_suffix(".partial")
        partial.write_bytes(_pack(client_id, state))
        os.replace(partial, path)

    def __contains__(self, client_id: object) -> bool:
        return isinstance(client_id, str) and is_stored(self.directory, client_id)

    def clear(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def save(self, directory: Path) -> None:
        for path in self.directory.glob(f"*{SUFFIX}"):
            _link(path, directory / path.name)

    def load(self, directory: Path, client_ids: Sequence[str] | None = None) -> None:
        self.clear()
        self.directory.mkdir(parents=True)
        for path in _files(directory, client_ids):
            _link(path, self.directory / path.name)


def _files(directory: Path, client_ids: Sequence[str] | None) -> list[Path]:
    if client_ids is None:
        return sorted(directory.glob(f"*{SUFFIX}"))
    return [directory / _file_name(client_id) for client_id in client_ids]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system, or one without hard links.
        shutil.copyfile(source, target)


def _map_tensors(tree: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a tree with a function applied to every tensor."""
    if isinstance(tree, dict):
        return {key: _map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(value, function) for value in tree)
    return function(tree) if isinstance(tree, torch.Tensor) else tree
