"""SHA-256 digest of a file."""

from __future__ import annotations

import functools
import hashlib
import os


# The hash is faster than the call of `read` for blocks of this size.
_BLOCK_BYTES = 1 << 20


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 digest of a file as 64 hexadecimal digits. The file is read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def sha256_of_unchanged_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 digest of a file. A file of the same size and time of change is read once in a process."""
    status = os.stat(path)
    return _hash_once(os.fspath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache
def _hash_once(path: str, size: int, modified: int) -> str:
    return sha256_of_file(path)
