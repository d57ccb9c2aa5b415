"""Comparison of the settings of two parties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


# The words that follow the first and the second party's value in a message.
PartyNames = tuple[str, str]
LOCAL_AND_REMOTE: PartyNames = ("locally", "remotely")
_MAX_CHARACTERS = 60
# Config settings that may differ between the parties of a run.
PARTY_SPECIFIC = {
    "base_model_name_or_path",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "revision",
    "transformers_version",
    "use_cache",
}


def differences(local: Mapping[str, Any], remote: Mapping[str, Any], prefix: str, names: PartyNames) -> list[str]:
    """
    List the settings in which two mappings differ, one message per setting.

    Args:
        local (`Mapping[str, Any]`): JSON values. Nested mappings are compared setting by setting.
        remote (`Mapping[str, Any]`): The other party's values.
        prefix (`str`): Text before the name of each setting.
        names (`tuple[str, str]`):
            The words that follow the values of `local` and `remote`, such as `("at the server", "at the client")`.
    """
    first, second = flatten(local, prefix), flatten(remote, prefix)
    return [
        format_difference(key, _shorten(first, key), _shorten(second, key), names)
        for key in sorted(first.keys() | second.keys())
        # `repr` distinguishes True from 1, which compare equal in Python.
        if repr(first.get(key)) != repr(second.get(key)) or (key in first) is not (key in second)
    ]


def format_difference(setting: str, local: object, remote: object, names: PartyNames) -> str:
    """Format the two values of one setting as a message."""
    return f"{setting}: {local} {names[0]}, {remote} {names[1]}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested mappings to one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shorten(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not given"
    text = repr(values[key])
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"
