"""`StateHistory`: the states of a client on disk, so that it can answer a request again after it was killed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ..utils.errors import CheckpointError
from ..utils.storage import size_of_folder, storage_errors, write_private
from ..utils.untrusted_json import read_json
from .models import ClientModels
from .store import link_or_copy


DIGESTS_FILE = "digests.json"
REPLY_FILE = "reply.bin"
# Folder of a state that is being written.
_PARTIAL = ".partial"
# Names of the folders of states. The directory may contain other files.
_NAME = re.compile(r"[0-9a-f]{32}")


class StateHistory:
    """
    The states of a client after its replies, each in a folder with the name of the request.

    A state and the reply that belongs to it are on disk before the reply is sent. A client that is killed therefore
    answers the same request with the same reply, and returns to an earlier state if the server does. A state that
    equals the state before it is not written again: both have the same files.

    Args:
        directory (`str` or `os.PathLike`): Folder of the states. Only one client may use it.
        models ([`ClientModels`]): The models and the state of the client.
        writes (`bool`, *optional*, defaults to `True`): Whether this process writes the states. If several processes
            train the client, one of them writes, and all of them read the folder.
    """

    def __init__(self, directory: str | os.PathLike[str], models: ClientModels, writes: bool = True) -> None:
        self.directory = Path(directory)
        self._models = models
        self._writes = writes
        # Name of the state that `models` has. Empty before the first request.
        self.current = ""
        # `num_changes` of the models when they had this state.
        self._num_changes: int | None = None

    def reply_to(self, name: str) -> bytes | None:
        """
        Return the reply to a request, if the client has carried it out.

        Args:
            name (`str`): Name of the request.
        """
        path = self._folder(name) / REPLY_FILE
        return path.read_bytes() if path.is_file() else None

    def repeat(self, earlier: str, name: str, reply: bytes) -> None:
        """
        Give the state after a request to another request with the same content.

        A state that no longer exists is not needed: the server repeats the later requests, too.

        Args:
            earlier (`str`): Name of the earlier request.
            name (`str`): Name of the request.
            reply (`bytes`): The reply to the request.
        """
        folder, partial = self._folder(earlier), self.directory / _PARTIAL
        if self._writes:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            _link_state(folder, partial)
            self._complete(partial, name, reply)

    def has_state(self, name: str) -> bool:
        """Whether the state after a request exists."""
        return (self._folder(name) / DIGESTS_FILE).is_file()

    def restore(self, name: str) -> None:
        """
        Return to a state.

        Args:
            name (`str`): Name of the state. Empty for the state before the first request.

        Raises:
            CheckpointError: If the state is missing or damaged.
        """
        if name == self.current:
            return
        if not name:
            self._models.clear()
        else:
            folder = self._folder(name)
            try:
                digests = read_json(folder / DIGESTS_FILE)
                if not isinstance(digests, dict) or not all(isinstance(each, str) for each in digests.values()):
                    raise ValueError(f"{DIGESTS_FILE} is damaged.")
                self._models.load(folder, digests)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"The server continues from a state of this client that {str(self.directory)!r} does not contain: "
                    f"{error}. Use the folder of the client's earlier process, or start a new run."
                ) from error
        self._set_current(name)

    def record(self, name: str, reply: bytes) -> None:
        """
        Write the state of the models and the reply that belongs to it.

        Args:
            name (`str`): Name of the request.
            reply (`bytes`): The reply.
        """
        if self._writes:
            is_changed = self._is_changed()
            with storage_errors(self.directory, lambda: len(reply) + (self._size_of_state() if is_changed else 0)):
                self._write(name, reply, is_changed)
        self._set_current(name)

    def _set_current(self, name: str) -> None:
        self.current, self._num_changes = name, self._models.num_changes

    def _is_changed(self) -> bool:
        """Whether the state of the models may differ from the files of the current state."""
        num_changes = self._models.num_changes
        return num_changes is None or num_changes != self._num_changes or not self.has_state(self.current)

    def _write(self, name: str, reply: bytes, is_changed: bool) -> None:
        partial = self.directory / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            if is_changed:
                digests = self._models.save(partial)
                write_private(partial / DIGESTS_FILE, json.dumps(digests).encode())
            else:
                _link_state(self._folder(self.current), partial)
            self._complete(partial, name, reply)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _complete(self, partial: Path, name: str, reply: bytes) -> None:
        folder = self._folder(name)
        write_private(partial / REPLY_FILE, reply)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def prune(self, kept: Collection[str], replies: Collection[str] = ()) -> None:
        """
        Delete all states and replies but some.

        Args:
            kept (`Collection[str]`): Names of the states to keep, in addition to the current one.
            replies (`Collection[str]`, *optional*): Names of the replies to keep, in addition to the current one.
        """
        if not self._writes:
            return
        folders = {self._folder(name) for name in kept if name}
        replied = {self._folder(name) for name in replies}
        current = self._folder(self.current) if self.current else None
        for folder in self.directory.iterdir() if self.directory.is_dir() else ():
            if folder == current or not _NAME.fullmatch(folder.name):
                continue
            if folder not in folders | replied:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            for file in folder.iterdir():
                is_reply = file.name == REPLY_FILE
                if folder not in (replied if is_reply else folders):
                    file.unlink(missing_ok=True)

    def _size_of_state(self) -> int:
        """Number of bytes of the current state without its reply. The states of a client have similar sizes."""
        folder = self._folder(self.current)
        reply = folder / REPLY_FILE
        return size_of_folder(folder) - (reply.stat().st_size if reply.is_file() else 0)

    def _folder(self, name: str) -> Path:
        # The name comes from the server, so it is not used as a path.
        return self.directory / hashlib.sha256(name.encode()).hexdigest()[:32]


def _link_state(source: Path, target: Path) -> None:
    """Give the files of a state to another state, without the reply."""
    for file in source.iterdir():
        if file.name != REPLY_FILE:
            link_or_copy(file, target / file.name)
