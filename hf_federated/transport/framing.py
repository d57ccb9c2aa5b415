"""A blob of bytes with a JSON header: four bytes with the length of the header, the header and the content."""

from __future__ import annotations

import json
from typing import Any

from ..utils.printable import printable
from .protocol import parse_json_object


MAX_HEADER_BYTES = 1 << 20


def frame(header: dict[str, Any]) -> bytes:
    """
    Encode the header of a blob. The content follows.

    Args:
        header (`dict[str, Any]`): JSON values.
    """
    text = json.dumps(header).encode("ascii")
    return len(text).to_bytes(4, "big") + text


def unframe(blob: bytes | memoryview, **types: Any) -> tuple[dict[str, Any], memoryview]:
    """
    Split a blob into its header and its content.

    Args:
        blob (`bytes` or `memoryview`): A header from [`frame`], and a content.
        types (`Any`): Type of each field of the header, by name.

    Returns:
        `tuple[dict[str, Any], memoryview]`: The header, and the content without a copy.

    Raises:
        ValueError: If the blob is damaged, or the header has other fields or types.
    """
    view = memoryview(blob)
    length = int.from_bytes(view[:4], "big")
    if len(view) < 4 or length > min(len(view) - 4, MAX_HEADER_BYTES):
        raise ValueError("The header of a message is missing or too long.")
    header = parse_json_object(bytes(view[4 : 4 + length]), "The header of a message", MAX_HEADER_BYTES)
    if header.keys() != types.keys() or not all(type(header[name]) is kind for name, kind in types.items()):
        names = ", ".join(f"{name}: {kind.__name__}" for name, kind in types.items())
        raise ValueError(
            f"The header of a message must have the fields {names}, but has the fields "
            f"{printable(sorted(header), 500)}."
        )
    return header, view[4 + length :]
