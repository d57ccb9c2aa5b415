"""Two parties' settings side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


# Whose values are whose.
Names = tuple[str, str]
HERE_AND_THERE: Names = ("here", "there")
_MAX_CHARACTERS = 60


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str, names: Names) -> list[str]:
    """
    What two mappings have otherwise, in words.

    Args:
        mine (`Mapping[str, Any]`): Values as JSON holds them, mappings among them.
        theirs (`Mapping[str, Any]`): The other party's.
        prefix (`str`): Before every name.
        names (`tuple[str, str]`): Whose values are whose, such as `("here", "there")`.
    """
    own, others = flat(mine, prefix), flat(theirs, prefix)
    return [
        side_by_side(key, _shown(own, key), _shown(others, key), names)
        for key in sorted(own.keys() | others.keys())
        # True == 1, and here they differ.
        if repr(own.get(key)) != repr(others.get(key)) or (key in own) is not (key in others)
    ]


def side_by_side(what: str, mine: object, theirs: object, names: Names) -> str:
    """Both values of one thing, in words."""
    return f"{what}: {mine} {names[0]}, {theirs} {names[1]}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Mappings within mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not given"
    text = repr(values[key])
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"
