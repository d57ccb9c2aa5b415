"""The settings of a party that the other party compares with its own settings on connection."""

from __future__ import annotations

from typing import Any, Protocol

from ..utils.printable import printable


_MAX_SHOWN = 8
# Largest number of characters of a difference: a name and two values.
_MAX_CHARACTERS = 1500


class SessionConfig(Protocol):
    """Settings that both parties of a session must share. The transport only compares them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""

    def differences(self, theirs: Any, is_client: bool = False) -> list[str]:
        """
        Return the settings in which the other party differs, one message per setting.

        Args:
            theirs (`dict[str, Any]`): The output of the other party's `to_dict()`. It is untrusted input.
            is_client (`bool`, *optional*, defaults to `False`): Whether this party is the client.

        Raises:
            ValueError: If `theirs` is not the output of `to_dict()`.
        """


def format_differences(differences: list[str]) -> str:
    """Format the first differences as one line. They contain names and values of the other party."""
    remainder = f"; and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    return "; ".join(printable(text, _MAX_CHARACTERS) for text in differences[:_MAX_SHOWN]) + remainder
