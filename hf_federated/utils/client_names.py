"""Names of folders and of `datasets` configurations for client ids.

A client id may be any text. A name must be safe as a folder on every file system, in a glob, in YAML and as a
configuration of a dataset repository. `partition.json` contains the map from ids to names, so a name is never
converted back to an id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable


# Maximum length of a name. File systems allow 255 bytes, and caches add prefixes.
MAX_NAME_LENGTH = 120

# Names with another meaning: `default` is a configuration of all clients, the others are devices on Windows.
_RESERVED = re.compile(r"default|con|prn|aux|nul|com\d|lpt\d")

_UNESCAPED = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


def escape_client_id(client_id: str) -> str:
    """
    Return the name under which a client is stored.

    Lower-case ASCII letters, digits and hyphens are kept. Every other byte of the UTF-8 text becomes `_` and two hex
    digits. Upper-case letters are escaped because some file systems ignore case. For a reserved name (`default`,
    `con`, …) and a name with a leading hyphen, the first character is escaped. A name of more than 120 characters is
    truncated and ends in a hash. Different ids have different names.

    Args:
        client_id (`str`): Id of the client, not empty.

    Returns:
        `str`: The name.

    Raises:
        ValueError: If the id is empty or is not valid Unicode text (a lone surrogate).

    Example:

    ```python
    >>> from hf_federated.utils.client_names import escape_client_id
    >>> [escape_client_id(client_id) for client_id in ("anna-7", "Zoë", "../etc", "default", "007")]
    ['anna-7', '_5ao_c3_ab', '_2e_2e_2fetc', '_64efault', '007']

    ```
    """
    if not client_id:
        raise ValueError("A client id is the empty string. Set a non-empty id for every client.")
    try:
        encoded = client_id.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"The client id {client_id!r} is not valid Unicode text. Set an id that can be encoded as UTF-8."
        ) from None
    name = "".join(chr(byte) if chr(byte) in _UNESCAPED else f"_{byte:02x}" for byte in encoded)
    if _RESERVED.fullmatch(name) or name.startswith("-"):
        name = f"_{ord(name[0]):02x}{name[1:]}"
    if len(name) > MAX_NAME_LENGTH:
        # Only truncated names contain "__", so a truncated name never equals a complete name.
        digest = hashlib.sha256(encoded).hexdigest()[:32]
        name = f"{name[: MAX_NAME_LENGTH - len(digest) - 2]}__{digest}"
    return name


def escape_client_ids(client_ids: Iterable[str]) -> dict[str, str]:
    """Return a dictionary from client id to name, in the order of `client_ids`."""
    return {client_id: escape_client_id(client_id) for client_id in client_ids}
