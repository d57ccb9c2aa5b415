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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..messages.serialization import pack, unpack


SUFFIX = ".safetensors"


def _file_name(client_id: str) -> str:
    # A digest, since any text is a client id and not every text is a file name; the file holds the id itself.
    return hashlib.sha256(client_id.encode()).hexdigest()[:32] + SUFFIX


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
    def remove(self, client_id: str) -> None:
        """Forget a client."""

    @abstractmethod
    def __contains__(self, client_id: object) -> bool:
        """Whether a client keeps anything."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every client."""

    @abstractmethod
    def save(self, directory: Path) -> dict[str, str]:
        """
        Write all states into a directory, one file each.

        Returns:
            `dict[str, str]`: The SHA-256 digest of each client's file.
        """

    @abstractmethod
    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        """
        Replace all states by those of a directory that `save` wrote.

        Args:
            directory (`pathlib.Path`): Written by stores of any kind, each with clients of its own.
            digests (`Mapping[str, str]`): Whose to read, with what `save` returned of them.

        Raises:
            ValueError: If a file is missing or another than was saved. The message names the client.
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

    def remove(self, client_id: str) -> None:
        self._states.pop(client_id, None)

    def __contains__(self, client_id: object) -> bool:
        return client_id in self._states

    def clear(self) -> None:
        self._states = {}

    def save(self, directory: Path) -> dict[str, str]:
        digests: dict[str, str] = {}
        for client_id, state in self._states.items():
            blob = _pack(client_id, state)
            (directory / _file_name(client_id)).write_bytes(blob)
            digests[client_id] = hashlib.sha256(blob).hexdigest()
        return digests

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        files = {client_id: _checked_file(directory, client_id, digest) for client_id, digest in digests.items()}
        self._states = {client_id: unpack(path.read_bytes())["state"] for client_id, path in files.items()}


class DiskStore(ClientStore):
    """
    One file a client, for federations whose states do not fit in memory.

    A file is replaced as a whole and never written to again, so a checkpoint holds hard links to the files of its
    moment and costs no copy.

    Args:
        directory (`str` or `os.PathLike`): Where the files live. What lies there is deleted by `clear`.

    Raises:
        OSError: If a file cannot be written or read. The message names it.

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
        # Of each client's file; `None` if it was not needed since the file was written.
        self._digests: dict[str, str | None] = {}

    def get(self, client_id: str) -> dict[str, Any]:
        path = self.directory / _file_name(client_id)
        with _naming(path):
            return unpack(path.read_bytes())["state"] if path.exists() else {}

    def set(self, client_id: str, state: dict[str, Any]) -> None:
        path = self.directory / _file_name(client_id)
        partial = path.with_suffix(".partial")
        blob = _pack(client_id, state)
        with _naming(path):
            self.directory.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(blob)
            os.replace(partial, path)
        self._digests[client_id] = None

    def remove(self, client_id: str) -> None:
        (self.directory / _file_name(client_id)).unlink(missing_ok=True)
        self._digests.pop(client_id, None)

    def __contains__(self, client_id: object) -> bool:
        return isinstance(client_id, str) and (self.directory / _file_name(client_id)).exists()

    def clear(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._digests = {}

    def save(self, directory: Path) -> dict[str, str]:
        digests: dict[str, str] = {}
        for client_id, digest in self._digests.items():
            path = self.directory / _file_name(client_id)
            _link(path, directory / path.name)
            digests[client_id] = _digest(path) if digest is None else digest
        self._digests.update(digests)
        return digests

    def load(self, directory: Path, digests: Mapping[str, str]) -> None:
        self.clear()
        self.directory.mkdir(parents=True)
        for client_id, digest in digests.items():
            path = _checked_file(directory, client_id, digest)
            _link(path, self.directory / path.name)
        self._digests.update(digests)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error say which file it was about: a full disk, for one, does not."""
    try:
        yield
    except OSError as error:
        reason = (
            f"{error.strerror or error}. What clients keep lies below `output_dir`: make room there, choose another "
            "place, or set client_store='memory'"
        )
        raise OSError(error.errno, reason, os.fspath(path)) from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)!r}: {error}") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _checked_file(directory: Path, client_id: str, digest: str) -> Path:
    path = directory / _file_name(client_id)
    if not path.is_file() or _digest(path) != digest:
        what = "is another file than was saved" if path.exists() else "is missing"
        raise ValueError(
            f"What client {client_id!r} keeps, {os.fspath(path)!r}, {what}: the checkpoint was damaged or copied in "
            "part. Copy it again, or resume from another one."
        )
    return path


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
