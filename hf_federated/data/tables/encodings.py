"""Find the encoding of a text file."""

from __future__ import annotations

import codecs
import gzip
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .byte_stream import open_bytes
from .legacy_encodings import legacy_encoding
from .table import TableError


CHUNK_BYTES = 1 << 20
# The start of a change of the character set in ISO-2022-JP and ISO-2022-KR.
ESCAPE = re.compile(rb"\x1b[$(]")
# The byte order mark of UTF-32-LE starts with the mark of UTF-16-LE, so it is tested first.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def find_encoding(path: Path, given: str | None = None) -> str:
    """
    Find the encoding of a text file, and check that the whole file has this encoding.

    A byte order mark determines the encoding. Without a mark, a file with zero bytes is UTF-16, and any other file is
    UTF-8 if it is valid UTF-8. Otherwise the file is cp1252, the encoding of Excel in Western Europe, if its text
    looks like text in that encoding.

    Args:
        path (`Path`): The file, which may be compressed.
        given (`str`, *optional*): The encoding that the user sets.

    Returns:
        `str`: The name of the encoding in Python.

    Raises:
        TableError: If the file has bytes that the encoding does not allow, or its encoding is ambiguous.
    """
    try:
        return _find_encoding(path, given)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
        raise TableError(f"{path} is a damaged archive: {error}. Copy or compress the file again.") from error


def _find_encoding(path: Path, given: str | None) -> str:
    with open_bytes(path) as file:
        start = file.read(4)
    marked = next((name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)), None)
    if given is not None:
        name = codecs.lookup(given).name
        encoding = marked if marked is not None and marked.startswith(name) else name
    else:
        encoding = marked or _utf16_without_mark(path) or "utf-8"
    if _decodes(path, encoding):
        if encoding == "utf-8" and given is None:
            _check_escapes(path)
        return encoding
    if encoding == "utf-8" and given is None:
        return legacy_encoding(path)
    line, reason = _first_invalid(path, encoding)
    where = f"{path}, line {line}" if line else str(path)
    set_by = "The encoding was set by an option." if given is not None else f"The file starts like a {encoding} file."
    raise TableError(
        f"{where}: {reason} {set_by} Set the encoding of the file with data.csv.encoding in a recipe or"
        " --csv-encoding, or save the file as UTF-8."
    )


def chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked."""
    with open_bytes(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _decodes(path: Path, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    is_ascii_superset = encoding in ("utf-8", "cp1252")
    try:
        for chunk in chunks(path):
            # An ASCII chunk needs no decoder, unless the previous chunk ended within a character.
            if not (is_ascii_superset and chunk.isascii() and not decoder.getstate()[0]):
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _utf16_without_mark(path: Path) -> str | None:
    """
    `"utf-16-le"` or `"utf-16-be"` if the file has zero bytes like UTF-16, otherwise `None`.

    Each line break, digit and separator of UTF-16 has a zero byte, so zero bytes are at least as frequent as line
    breaks. In the wrong byte order, these characters are not ASCII.
    """
    ascii_counts = {"utf-16-le": 0, "utf-16-be": 0}
    zeros = breaks = size = 0
    rest = b""
    for chunk in chunks(path):
        zeros += chunk.count(0)
        size += len(chunk)
        breaks += chunk.count(b"\n") + chunk.count(b"\r")
        if zeros == 0:
            rest = b"" if (len(rest) + len(chunk)) % 2 == 0 else b"-"  # only the parity matters
            continue
        chunk = rest + chunk
        pairs = np.frombuffer(chunk[: len(chunk) // 2 * 2], dtype=np.uint8).reshape(-1, 2)
        rest = chunk[pairs.size :]
        for name, high, low in (("utf-16-le", pairs[:, 1], pairs[:, 0]), ("utf-16-be", pairs[:, 0], pairs[:, 1])):
            ascii_counts[name] += int(((high == 0) & (low > 0) & (low < 128)).sum())
    if zeros == 0 or zeros < breaks or len(rest) % 2:
        return None
    # A character of UTF-16 has at most one zero byte, and a character of UTF-32 at least one.
    if 2 * zeros > size:
        raise TableError(
            f"{path} has more zero bytes than a file in UTF-16. It is UTF-32, or it is no text file. Set"
            " data.csv.encoding in a recipe or --csv-encoding to utf-32-le or utf-32-be."
        )
    little, big = ascii_counts.values()
    if little == big:
        raise TableError(
            f"{path} has zero bytes, and can be utf-16-le or utf-16-be. Set data.csv.encoding in a recipe or"
            " --csv-encoding to one of them."
        )
    return "utf-16-le" if little > big else "utf-16-be"


def check_zeros(path: Path, encoding: str) -> None:
    """Raise a [`TableError`] with the line of the first zero byte."""
    if encoding.startswith(("utf-16", "utf-32")):
        return
    lines = 1
    for chunk in chunks(path):
        if (position := chunk.find(0)) >= 0:
            lines += chunk.count(b"\n", 0, position)
            raise TableError(
                f"{path}, line {lines}: the file has a zero byte (NUL), which is no text. The file is damaged, or it"
                " is no text file. Export it again, or remove the zero bytes."
            )
        lines += chunk.count(b"\n")


def _check_escapes(path: Path) -> None:
    """Raise a [`TableError`] with the line of the first escape sequence of ISO-2022, whose other bytes are ASCII."""
    lines, last = 1, b""
    for chunk in chunks(path):
        text = last + chunk
        if b"\x1b" in text and (found := ESCAPE.search(text)):
            line = lines + text.count(b"\n", 0, found.start())
            raise TableError(
                f"{path}, line {line}: the file has the escape sequence {found[0]!r}, so its encoding is probably"
                " iso2022_jp (Japanese), not UTF-8. Set data.csv.encoding in a recipe or --csv-encoding to the"
                " encoding of the file, or save the file as UTF-8."
            )
        lines, last = lines + text.count(b"\n", 0, len(text) - 1), text[-1:]


def _first_invalid(path: Path, encoding: str) -> tuple[int, str]:
    """The line of the first invalid bytes, and a sentence about them."""
    if encoding.startswith(("utf-16", "utf-32")):
        return 0, f"the file is not valid {encoding}."
    number = 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode(encoding)
            except UnicodeDecodeError as error:
                bytes_ = line[error.start : error.end].hex(" ")
                before = line[max(0, error.start - 20) : error.start].decode(encoding, errors="replace")
                return number, f"the bytes {bytes_} after {before!r} are not valid {encoding}."
    return number, f"the file ends within a character of {encoding}."
