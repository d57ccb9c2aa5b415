"""Client ids as names of folders and of `datasets` configurations.

An id may be any text; a name has to be safe as a folder on every file system, in a glob, in YAML and as a
configuration of a data set repository. The map between them stands in `partition.json`, so a name is never read back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable


# Longest name that is written in full; file systems allow 255 bytes, and caches put prefixes before it.
MAX_NAME_LENGTH = 120

# Names that mean something else: a configuration of all clients, and devices on Windows.
_RESERVED = re.compile(r"default|con|prn|aux|nul|com\d|lpt\d")

_KEPT = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")


def escape_client_id(client_id: str) -> str:
    """
    The name under which a client is stored.

    Lower-case ASCII letters, digits and hyphens stay; every other byte of the UTF-8 text becomes `_` and two hex
    digits (upper case too, because some file systems do not tell it apart). A reserved name (`default`, `con`, …) and
    a leading hyphen are escaped at their first character. Names of more than 120 characters are cut and end in a hash.
    Different ids have different names.

    Args:
        client_id (`str`): A client's id; not empty.

    Raises:
        `ValueError`: If the id is empty or is no valid Unicode text (a lone surrogate).

    Example:

    ```python
    >>> from hf_federated.utils.client_names import escape_client_id
    >>> [escape_client_id(client_id) for client_id in ("anna-7", "Zoë", "../etc", "default", "007")]
    ['anna-7', '_5ao_c3_ab', '_2e_2e_2fetc', '_64efault', '007']

    ```
    """
    if not client_id:
        raise ValueError("A client id is the empty string. Give every client a name.")
    try:
        encoded = client_id.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"The client id {client_id!r} is no valid Unicode text, so it cannot name a folder."
        ) from None
    name = "".join(chr(byte) if chr(byte) in _KEPT else f"_{byte:02x}" for byte in encoded)
    if _RESERVED.fullmatch(name) or name.startswith("-"):
        name = f"_{ord(name[0]):02x}{name[1:]}"
    if len(name) > MAX_NAME_LENGTH:
        # "__" occurs in no other name, so that a cut name never equals one written in full.
        digest = hashlib.sha256(encoded).hexdigest()[:32]
        name = f"{name[: MAX_NAME_LENGTH - len(digest) - 2]}__{digest}"
    return name


def escape_client_ids(client_ids: Iterable[str]) -> dict[str, str]:
    """`dict[str, str]`: client id to its name, in the order given."""
    return {client_id: escape_client_id(client_id) for client_id in client_ids}
