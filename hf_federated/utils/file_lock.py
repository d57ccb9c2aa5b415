"""An exclusive lock of a file, which the operating system releases when its process ends for any reason.

The lock is an advisory lock (`flock`): it keeps out the processes that ask for the lock. On NFS, Linux implements it
with the locks of the NFS server, so it also holds between machines, if the server supports locks. Windows has no
`flock`; there, the lock is always granted.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import weakref
from pathlib import Path
from typing import BinaryIO


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # mypy expects a module

# Errors of `flock` if another process has the lock.
_HELD_ERRORS = (errno.EACCES, errno.EAGAIN)
_MAX_HOLDER_BYTES = 200


class FileLockedError(RuntimeError):
    """
    Another process has the lock.

    Args:
        holder (`str`): The process that has the lock, for an error message.
    """

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class FileLock:
    """
    Exclusive lock of a file. While the lock is held, the file contains the process id and the host of the holder.

    Args:
        path (`pathlib.Path`): The file. Its folder must exist.

    Example:

    ```python
    >>> import tempfile
    >>> from pathlib import Path
    >>> from hf_federated.utils.file_lock import FileLock

    >>> path = Path(tempfile.mkdtemp()) / "run.lock"
    >>> lock = FileLock(path)
    >>> lock.acquire()
    >>> path.exists()
    True
    >>> lock.release()
    >>> path.exists()
    False

    ```
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object has the lock. A forked process does not inherit the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """
        Acquire the lock without waiting.

        Raises:
            FileLockedError: If another process, or another lock of this process, has the lock.
            OSError: If the file cannot be created, or the file system has no locks.
        """
        while self._file is None:
            file = open(self.path, "a+b", buffering=0)
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _read_holder(file)
                file.close()
                if error.errno in _HELD_ERRORS:
                    raise FileLockedError(holder) from error
                raise
            # The previous holder may have deleted the file after this process opened it.
            if _is_same_file(file, self.path):
                self._file = file
                _HELD.add(self)
            else:
                file.close()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())

    def release(self) -> None:
        """Delete the file and release the lock, if this object has the lock."""
        if self._file is not None:
            # Windows does not delete an open file.
            if fcntl is not None:
                self.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Close the file. This releases the lock, unless another process inherited the open file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            _HELD.discard(self)


_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def read_holder(path: Path) -> tuple[int, str] | None:
    """
    Return the process id and the host that a lock file names, or `None` if there is no such file.

    The holder may have been killed: then the file remains, and its lock is free. This function does not ask for the
    lock, because a process that asks for it at the same moment would fail.
    """
    try:
        text = path.read_bytes()[:_MAX_HOLDER_BYTES].decode(errors="replace")
    except OSError:
        return None
    match = re.fullmatch(r"process (\d{1,9}) on (.+)", text)
    return None if match is None else (int(match[1]), match[2])


def _close_in_child() -> None:
    # A forked process, such as a worker of a data loader, would keep the lock after its parent was killed.
    for lock in list(_HELD):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _read_holder(file: BinaryIO) -> str:
    file.seek(0)
    return file.read(_MAX_HOLDER_BYTES).decode(errors="replace") or "another process"


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
