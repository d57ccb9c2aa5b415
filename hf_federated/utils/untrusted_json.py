"""JSON of a message or a file that another party wrote: limits that are checked before the text is parsed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


# A header with 100,000 tensors has about 15 MB and 1,000,000 values.
MAX_BYTES = 32 * 1024**2
MAX_VALUES = 1_000_000
# A file is larger than a message: the ledger of 1,000 rounds with 1,000 clients has 10,000,000 values.
MAX_FILE_BYTES = 512 * 1024**2
MAX_FILE_VALUES = 50_000_000
# The limits of the fields of messages are smaller.
MAX_DEPTH = 100
MAX_TEXT = 1024**2


def parse_json(
    text: str | bytes | memoryview,
    max_bytes: int = MAX_BYTES,
    max_values: int = MAX_VALUES,
    max_depth: int | None = MAX_DEPTH,
    max_text: int | None = MAX_TEXT,
) -> Any:
    """
    Parse JSON that another party wrote.

    A parser creates an object for each value, and holds the interpreter's lock until it ends: `[],` repeated in 39 MB
    becomes 13 million lists with 1.3 GB. Each value but the first follows a comma or an opening bracket, so these
    characters bound the number of values. They are counted in a few milliseconds.

    Args:
        text (`str`, `bytes` or `memoryview`): The text. Bytes are UTF-8.
        max_bytes (`int`, *optional*): Largest number of bytes, or of characters of a `str`.
        max_values (`int`, *optional*): Largest number of values. Commas and brackets in a text count too.
        max_depth (`int`, *optional*): Largest number of levels. `None` is the limit of the interpreter.
        max_text (`int`, *optional*): Largest number of characters of a text in the JSON. `None` is no limit.

    Raises:
        ValueError: If the text is longer, has more values, has a longer text, is nested too deeply, or is not JSON.

    Example:

    ```python
    >>> from hf_federated.utils.untrusted_json import parse_json

    >>> parse_json(b'{"rows": [3, 4]}')
    {'rows': [3, 4]}
    >>> parse_json("[[],[],[]]", max_values=3)
    Traceback (most recent call last):
    ...
    ValueError: the JSON text has up to 7 values, and at most 3 are allowed
    ```
    """
    if len(text) > max_bytes:
        raise ValueError(f"the JSON text has {len(text)} bytes, and at most {max_bytes} are allowed")
    content = text if isinstance(text, str) else str(text, "utf-8")
    num_values = 1 + sum(map(content.count, ",[{"))
    if num_values > max_values:
        raise ValueError(f"the JSON text has up to {num_values} values, and at most {max_values} are allowed")
    try:
        parsed = json.loads(content)
    except RecursionError:
        raise ValueError("the values of the JSON text are nested too deeply") from None
    if max_depth is not None and num_values > max_depth:
        _check_depth(parsed, max_depth)
    if max_text is not None and len(content) > max_text:
        _check_texts(parsed, max_text)
    return parsed


def read_json(path: str | os.PathLike[str]) -> Any:
    """
    Parse a JSON file, which another program or party may have written.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is too large, or as [`parse_json`].
    """
    if (num_bytes := os.path.getsize(path)) > MAX_FILE_BYTES:
        raise ValueError(f"the file has {num_bytes} bytes, and at most {MAX_FILE_BYTES} are allowed")
    return parse_json(Path(path).read_bytes(), MAX_FILE_BYTES, MAX_FILE_VALUES, max_text=None)


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """
    Parse a JSON file that must contain an object, such as a config.

    Args:
        path (`str` or `os.PathLike`): The file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file does not contain an object, or as [`read_json`].
    """
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{os.fspath(path)} must contain a JSON object, and contains a {type(values).__name__}.")
    return values


def _check_depth(parsed: Any, max_depth: int) -> None:
    # A recursion into deep values would fail.
    level = [parsed]
    for _ in range(max_depth):
        level = [value for container in map(_entries, level) for value in container if type(value) in (list, dict)]
        if not level:
            return
    raise ValueError(f"the values of the JSON text are nested too deeply: at most {max_depth} levels are allowed")


def _check_texts(parsed: Any, max_text: int) -> None:
    pending = [parsed]
    while pending:
        value = pending.pop()
        pending += _entries(value)
        if isinstance(value, dict):
            pending += value
        if isinstance(value, str) and len(value) > max_text:
            raise ValueError(f"a text in the JSON has {len(value)} characters, and at most {max_text} are allowed")


def _entries(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
