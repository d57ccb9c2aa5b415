"""The lock of an output directory: two processes that train in one directory would delete each other's files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging

from ..distributed.process_group import ProcessGroup
from ..utils.errors import UserError
from ..utils.file_lock import FileLock, FileLockedError
from ..utils.run_files import LOCK_FILE


logger = logging.get_logger(__name__)


class OutputDirInUseError(UserError):
    """Another process trains in the output directory. The message names the process and its host."""


# The locks of this process and how often each is held, by resolved path. The command that trains a recipe holds the
# lock of its folder before and after its trainer does.
_LOCKS: dict[Path, tuple[FileLock, int]] = {}
_GUARD = threading.Lock()


@contextmanager
def output_dir_lock(
    output_dir: str | os.PathLike[str], processes: ProcessGroup | None = None, argument: str = "output_dir"
) -> Iterator[None]:
    """
    Hold the lock of an output directory. The main process of a launch holds it for all processes of the launch.

    The operating system releases the lock when the process ends, also if the process is killed. A process may hold the
    lock of a directory several times. If the directory cannot be written to, or its file system has no locks, a
    warning is logged and nothing is locked.

    On NFS, the lock also holds between machines if the NFS server supports locks (NFSv4, or NFSv3 with `lockd`). With
    the mount option `nolock` or `local_lock=flock`, the lock holds between the processes of one machine only.

    Args:
        output_dir (`str` or `os.PathLike`): The output directory. It is created if it does not exist.
        processes ([`ProcessGroup`], *optional*): The processes of the launch. All processes must then use this
            context. By default only this process uses it.
        argument (`str`, *optional*, defaults to `"output_dir"`): Name of the directory in an error.

    Raises:
        OutputDirInUseError: If another process holds the lock. All processes of the launch raise the error.
    """
    path, processes = Path(output_dir), processes or ProcessGroup(rank=0, world_size=1)
    holder = processes.run_on_main("lock of the output directory", lambda: _acquire(path))
    if holder is not None:
        raise OutputDirInUseError(
            f"Another run uses the {argument.replace('_dir', ' directory')} {os.fspath(output_dir)!r}: {holder}. Wait "
            f"until the run ends, stop the process, or set another `{argument}`."
        )
    try:
        yield
    finally:
        if processes.is_main:
            _release(path)


def _acquire(path: Path) -> str | None:
    """Acquire the lock of a directory once more. Return the holder if another process has the lock."""
    with _GUARD:
        try:
            os.makedirs(path, exist_ok=True)
            key = path.resolve()
            lock, count = _LOCKS.get(key, (FileLock(key / LOCK_FILE), 0))
            if not lock.is_held:
                lock.acquire()
                count = 0
        except FileLockedError as error:
            return error.holder
        except OSError as error:
            logger.warning(
                f"The output directory {os.fspath(path)!r} cannot be locked ({error}). Make sure that no other "
                "process trains in this directory."
            )
            return None
        _LOCKS[key] = lock, count + 1
    return None


def _release(path: Path) -> None:
    with _GUARD:
        key = path.resolve()
        if key not in _LOCKS:
            return
        lock, count = _LOCKS.pop(key)
        if count > 1:
            _LOCKS[key] = lock, count - 1
        else:
            lock.release()
