"""Files of a run: private files that are replaced at once, and errors of a folder that cannot be written to."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UserError


# Only the user who runs the process may read such a file.
PRIVATE = 0o600
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
# How safetensors and tokenizers name an error of the operating system. Both are written in Rust.
_RUST_ERROR = re.compile(r'\(os error (\d+)\)(?: at path "(.+)")?')
# `torch.save` names a failed `open` with the text of the operating system, and a failed write with two positions.
_TORCH_ERROR = re.compile(r"inline_container\.cc:\d+\] ?\. ?(?:open file failed with strerror: (.+)|unexpected pos)")


class StorageError(UserError, OSError):
    """A folder is full or cannot be written to. The message names the folder, the bytes and what to do."""


def write_private(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """
    Replace a file at once, so that a reader never sees a part of it.

    Args:
        path (`pathlib.Path`): The file.
        content (`bytes`): The new content.
        mode (`int`, *optional*, defaults to `0o600`): Permissions of the file, independent of the umask. The file has
            no further permissions from the moment it exists.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.chmod(temporary, mode)
            file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_private(path: Path, content: bytes) -> None:
    """
    Replace a file at once that only this process writes, and writes often.

    The staging file has a fixed name, so that a process that is killed again and again leaves at most one of them, and
    the next call removes it.

    Args:
        path (`pathlib.Path`): The file. Only its owner may read it.
        content (`bytes`): The new content.
    """
    staged = path.with_name(f"{path.name}.incomplete")
    with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "wb") as file:
        file.write(content)
    os.replace(staged, path)


def sync_folder(folder: Path) -> None:
    """Write the entry of a new file in a folder to disk. Windows cannot open folders and does not need this."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(
    folder: str | os.PathLike[str], num_bytes: Callable[[], int] = lambda: 0, advice: str = ""
) -> Iterator[None]:
    """
    Convert the errors of a full, read-only or forbidden folder into a [`StorageError`]. Other errors stay.

    Args:
        folder (`str` or `os.PathLike`): The folder to which the block writes.
        num_bytes (`Callable[[], int]`, *optional*): Returns the number of bytes that the block needs at least.
            `0` if it is not known.
        advice (`str`, *optional*): A further remedy, as a sentence.

    Raises:
        StorageError: If the disk or the quota is full, or the folder cannot be written to.
    """
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        found = _find_number(error, Path(folder))
        if found is None:
            raise
        raise StorageError(_describe(folder, found, num_bytes(), advice)) from error


def check_folder(folder: str | os.PathLike[str]) -> None:
    """
    Check that a folder can be created or written to, without a write.

    Args:
        folder (`str` or `os.PathLike`): The folder. It can be missing.

    Raises:
        StorageError: If the path or a part of it is a file, or if the folder cannot be written to.
    """
    path = Path(folder).absolute()
    existing = _existing_part(path)
    if not existing.is_dir():
        part = "is a file" if existing == path else f"cannot be created, because {existing} is a file"
        raise StorageError(f"The output folder {os.fspath(folder)} {part}. Choose another output folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        is_read_only = hasattr(os, "statvfs") and os.statvfs(existing).f_flag & os.ST_RDONLY
        raise StorageError(_describe(folder, errno.EROFS if is_read_only else errno.EACCES, 0, ""))


def check_free_space(
    folder: str | os.PathLike[str], checkpoint_bytes: int, num_checkpoints: int, limit: int = 0, existing: int = 0
) -> str | None:
    """
    Check that the checkpoints of a run fit on the disk of its output folder.

    Args:
        folder (`str` or `os.PathLike`): The output folder. It can be missing.
        checkpoint_bytes (`int`): Smallest size of a checkpoint.
        num_checkpoints (`int`): Number of checkpoints that exist at the same time.
        limit (`int`, *optional*, defaults to `0`): `save_total_limit`, or `0` for no limit.
        existing (`int`, *optional*, defaults to `0`): Bytes of checkpoints that the run replaces.

    Returns:
        `str`, *optional*: A warning, if one checkpoint fits but not all of them.

    Raises:
        StorageError: If not even one checkpoint fits.
    """
    usage = shutil.disk_usage(_existing_part(Path(folder).absolute()))
    free, needed = usage.free + existing, checkpoint_bytes * num_checkpoints
    if needed <= free or not usage.total:  # Some network file systems have no size.
        return None
    sizes = f"{os.fspath(folder)} has {format_size(free)} of free disk space, but "
    one = f"a checkpoint has at least {format_size(checkpoint_bytes)}"
    if checkpoint_bytes > free:
        raise StorageError(
            f"The output folder {sizes}{one}: at least {format_size(checkpoint_bytes - free)} are missing. Free disk "
            "space, choose another output folder, or set save_strategy='no'. Then continue with --resume "
            "(`resume_from_checkpoint=True`), or start again if there is no checkpoint."
        )
    cause, remedies = "there is no `save_total_limit`", ["set `save_total_limit`"]
    if limit:
        cause = f"save_total_limit={limit}, and the next checkpoint is written before one is deleted"
        remedies = ["set a smaller `save_total_limit`"] if limit > 1 else []
    return (
        f"The output folder {sizes}{one}, and {num_checkpoints} of them need {format_size(needed)} ({cause}). The run "
        f"would end with a full disk. {', '.join(['Free disk space', *remedies, 'or choose another output folder'])}."
    )


def _existing_part(path: Path) -> Path:
    """Return the path, or the innermost folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def size_of_folder(path: Path) -> int:
    """Return the number of bytes of all files in a folder, or 0 if there is no folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def format_size(num_bytes: int) -> str:
    """Return a number of bytes in a suitable unit, such as `8.4 MB`."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.1f} {unit}"
    return f"{num_bytes} bytes"


def _find_number(error: BaseException | None, folder: Path) -> int | None:
    """Return the number of the operating system's error behind an error, if it is one of storage."""
    while error is not None:
        number, text = getattr(error, "errno", None), str(error)
        path = getattr(error, "filename", None)
        if (match := _RUST_ERROR.search(text)) is not None:
            number, path = int(match[1]), match[2] or (str(folder) if int(match[1]) == errno.EROFS else None)
        elif isinstance(error, RuntimeError) and (match := _TORCH_ERROR.search(text)) is not None:
            texts = {os.strerror(each): each for each in (*_FULL, *_FORBIDDEN)}
            number, path = errno.ENOSPC if match[1] is None else texts.get(match[1].strip()), str(folder)
        if number in _FULL:
            return number
        # Other files, such as examples or keys, can be forbidden, too.
        if number in _FORBIDDEN and isinstance(path, (str, os.PathLike)) and _is_related(path, folder):
            return number
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _is_related(path: str | os.PathLike[str], folder: Path) -> bool:
    """Whether a path is in a folder, or above it, where the folder cannot be created."""
    first, second = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    return first.is_relative_to(second) or second.is_relative_to(first)


def _describe(folder: str | os.PathLike[str], number: int, num_bytes: int, advice: str) -> str:
    free = shutil.disk_usage(_existing_part(Path(folder).absolute())).free
    sizes = [f"at least {format_size(num_bytes)} are needed"] * (num_bytes > 0) + [f"{format_size(free)} are free"]
    remedy = "Free disk space" if number in _FULL else "Make the folder writable"
    sentences = [
        f"Writing to {os.fspath(folder)} failed: {os.strerror(number)}; {', '.join(sizes)}.",
        f"{remedy}, or choose another output folder.",
        advice,
        "Then continue with --resume (`resume_from_checkpoint=True`), or start again if there is no checkpoint.",
    ]
    return " ".join(filter(None, sentences))
