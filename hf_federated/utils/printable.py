"""Text of another party, made safe for a terminal, a log and a report.

A terminal obeys control characters: an escape sequence can delete lines or change the title of the window, a carriage
return replaces the line before it, a newline begins a line that looks like another entry of a log, and U+202E reverses
the order of the characters that follow. Text of a peer therefore passes [`printable`] before it is shown.
"""

from __future__ import annotations

import traceback


# Largest number of characters of a text of a peer.
MAX_LENGTH = 8000


def printable(text: object, max_length: int = MAX_LENGTH) -> str:
    """
    Return a text of another party as one line without control characters.

    Whitespace becomes one space. Each other character that `str.isprintable` excludes, such as a control character, a
    mark that changes the direction of writing, or a lone surrogate, becomes its escape sequence in Python.

    Args:
        text (`object`): The text, or an error with such a text.
        max_length (`int`, *optional*, defaults to 8000): Largest number of characters. A longer text ends in `…`.

    Example:

    ```python
    >>> from hf_federated.utils.printable import printable

    >>> printable("step 3\\r\\nRejected: client \\x1b[31m'north'")
    "step 3 Rejected: client \\\\x1b[31m'north'"
    >>> printable("loss" * 9, max_length=8)
    'losslos…'
    ```
    """
    text = str(text)
    shown = " ".join(text[: max_length + 1].split())
    if not shown.isprintable():
        shown = "".join(map(_escape, shown))
    is_whole = len(text) <= max_length + 1 and len(shown) <= max_length
    return shown if is_whole else f"{shown[: max_length - 1]}…"


def printable_traceback(error: BaseException) -> str:
    """
    Return the traceback of an error for a log. Its lines are indented, so that none looks like another entry.

    Args:
        error (`BaseException`): The error. Its text may contain text of another party.
    """
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(f"    {line[: len(line) - len(line.lstrip(' '))]}{printable(line)}" for line in lines)


def _escape(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
