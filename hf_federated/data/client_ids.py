"""Checks of client ids, and the errors for ids that are invalid or do not exist."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Iterable, Sequence

import numpy as np


def check_client_ids(client_ids: Sequence[str]) -> None:
    """Raise `ValueError` unless the ids are strings, valid Unicode text, not empty and unique."""
    if (
        len(set(client_ids)) == len(client_ids)
        and all(isinstance(i, str) and i for i in client_ids)
        and _is_unicode("".join(client_ids))
    ):
        return
    seen: set[str] = set()
    for client_id in client_ids:
        if not isinstance(client_id, str):
            raise ValueError(
                f"A client id must be a string, got {client_id!r} ({type(client_id).__name__}). Pass str(id)."
            )
        if not client_id:
            raise ValueError("A client id is the empty string. Give every client a non-empty id.")
        if not _is_unicode(client_id):
            raise ValueError(
                f"The client id {client_id!r} has a lone surrogate, so it is not valid Unicode text and cannot be "
                "stored or sent. Read the ids with the encoding of their file, or replace the character."
            )
        if client_id in seen:
            raise ValueError(f"The client id {client_id!r} occurs twice. Client ids must be unique.")
        seen.add(client_id)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def check_id_list(client_ids: Sequence[str]) -> None:
    """Raise `TypeError` for a single string, and `ValueError` for an empty list of requested ids."""
    if isinstance(client_ids, str):
        raise TypeError(f"Client ids: expected a list of ids, got the string {client_ids!r}. Pass [{client_ids!r}].")
    if not client_ids:
        raise ValueError("Client ids: the list of ids is empty. Pass at least one id.")


def check_requested_clients(client_ids: Sequence[str]) -> None:
    """Raise `TypeError` for a single string, and `ValueError` for an empty list or a repeated id."""
    check_id_list(client_ids)
    check_client_ids(client_ids)


def id_from_key(key: object) -> str:
    """Convert a key of a mapping of clients to a client id. Raise `TypeError` unless it is a string or an integer."""
    if isinstance(key, str):
        return str(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        return str(int(key))
    raise TypeError(
        f"from_dict: a client id must be a string or an integer, got {key!r} ({type(key).__name__}). Convert it to"
        " a string."
    )


def raise_for_empty_clients(client_ids: Sequence[str]) -> None:
    """Raise `ValueError` with the ids of clients without rows, if `client_ids` lists any."""
    if client_ids:
        shown = ", ".join(repr(client_id) for client_id in client_ids[:5])
        more = f" and {len(client_ids) - 5} more" if len(client_ids) > 5 else ""
        raise ValueError(f"A client without rows cannot train: {shown}{more}. Leave it out, or create fewer clients.")


def check_known(client_ids: Iterable[str], known: Collection[str], place: str = "") -> None:
    """
    Raise `KeyError` with similar ids for an id that no client has.

    Args:
        client_ids (`Iterable[str]`): The ids.
        known (`Collection[str]`): The ids of the clients.
        place (`str`, *optional*, defaults to `""`): Words after the id in the error, such as `" in the split 'test'"`.
    """
    for client_id in client_ids:
        if client_id not in known:
            raise KeyError(f"There is no client {client_id!r}{place}. {similar_ids_hint(client_id, list(known))}")


def find_look_alikes(names: Iterable[str]) -> list[list[str]]:
    """
    Find names that people read as one name: they differ in case, whitespace or invisible characters only.

    Args:
        names (`Iterable[str]`): Different names.

    Returns:
        `list[list[str]]`: The groups of at least two names, in the order of the names.

    Example:

    ```python
    >>> from hf_federated.data.client_ids import find_look_alikes

    >>> find_look_alikes(["North", "north", "north ", "south"])
    [['North', 'north', 'north ']]
    ```
    """
    names = list(names)
    keys = list(map(_as_read, names))
    if len(set(keys)) == len(keys):
        return []
    groups: dict[str, list[str]] = {}
    for key, name in zip(keys, names, strict=True):
        groups.setdefault(key, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def _as_read(name: str) -> str:
    """Return the same text for all names that look alike."""
    if not (name.isascii() and name.isprintable()):
        name = unicodedata.normalize("NFKC", name)
        name = "".join(character for character in name if character.isprintable() or character.isspace())
    return " ".join(name.split()).casefold()


def similar_ids_hint(client_id: object, known: Sequence[str]) -> str:
    """
    Return a sentence with the ids that resemble an unknown id, or with the number of clients if there is none.

    Args:
        client_id (`object`): An id that no client has.
        known (`Sequence[str]`): The ids of the clients.

    Example:

    ```python
    >>> from hf_federated.data.client_ids import similar_ids_hint

    >>> similar_ids_hint("NORHT", ["north", "south"])
    "Did you mean 'north'?"
    >>> similar_ids_hint("x", ["north", "south"])
    "There are 2 clients, the first is 'north'."
    ```
    """
    by_lower_case: dict[str, list[str]] = {}
    for known_id in known:
        by_lower_case.setdefault(known_id.lower(), []).append(known_id)
    matches = difflib.get_close_matches(str(client_id).lower(), by_lower_case, n=3)
    similar = [known_id for match in matches for known_id in by_lower_case[match]][:3]
    if similar:
        return f"Did you mean {', '.join(map(repr, similar))}?"
    return f"There are {len(known)} clients, the first is {known[0]!r}." if known else "There are no clients."
