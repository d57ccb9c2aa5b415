"""JSON that another party wrote: limits that are checked before the text is parsed."""

from __future__ import annotations

import json
from typing import Any


# A header with 100,000 tensors has about 15 MB and 1,000,000 values.
MAX_BYTES = 32 * 1024**2
MAX_VALUES = 1_000_000


def parse_json(text: str | bytes | memoryview, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> Any:
    """
    Parse JSON that another party wrote.

    A parser creates an object for each value, and holds the interpreter's lock until it ends: `[],` repeated in 39 MB
    becomes 13 million lists with 1.3 GB. Each value but the first follows a comma or an opening bracket, so these
    characters bound the number of values. They are counted in a few milliseconds.

    Args:
        text (`str`, `bytes` or `memoryview`): The text. Bytes are UTF-8.
        max_bytes (`int`, *optional*): Largest number of bytes, or of characters of a `str`.
        max_values (`int`, *optional*): Largest number of values. Commas and brackets in a text count too.

    Raises:
        ValueError: If the text is longer, has more values, is nested too deeply, or is not JSON.

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
        return json.loads(content)
    except RecursionError:
        raise ValueError("the values of the JSON text are nested too deeply") from None
