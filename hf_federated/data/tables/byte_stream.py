"""Open a file as a stream of bytes, and unpack it if it is compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path
from typing import BinaryIO, cast

from .table import TableError


def open_bytes(path: Path) -> BinaryIO:
    """
    Open a file, and unpack gzip, bzip2, xz and Zstandard files and ZIP archives with one file.

    The first bytes of the file, not its name, determine the compression.

    Raises:
        TableError: If an archive has several files, or the package for its compression is not installed.
    """
    with path.open("rb") as file:
        start = file.read(6)
    if start.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path))
    if start.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path))
    if start == b"\xfd7zXZ\x00":
        return cast(BinaryIO, lzma.open(path))
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        return _open_zstandard(path)
    if start.startswith(b"PK\x03\x04"):
        return _open_archive(path)
    return path.open("rb")


def _open_zstandard(path: Path) -> BinaryIO:
    try:
        import zstandard
    except ImportError as error:
        raise TableError(f"{path} is compressed with Zstandard. Unpack it, or run `pip install zstandard`.") from error
    return cast(BinaryIO, io.BufferedReader(zstandard.open(path)))


def _open_archive(path: Path) -> BinaryIO:
    archive = zipfile.ZipFile(path)
    # An archive from macOS also has `__MACOSX/._north.csv`.
    names = [name for name in archive.namelist() if not name.endswith("/") and "/." not in f"/{name}"]
    if len(names) != 1:
        raise TableError(
            f"{path} is a ZIP archive with {len(names)} files, but one table is read from a file. Unpack the archive."
        )
    return cast(BinaryIO, archive.open(names[0]))
