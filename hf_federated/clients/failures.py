"""`describe_failure`: an error of a client as its server may see it."""

from __future__ import annotations

import traceback
from pathlib import Path


_PACKAGE = Path(__file__).parents[1]


def describe_failure(error: Exception) -> str:
    """
    Describe an error without its text, which may contain an example of the client.

    Args:
        error (`Exception`): The error.

    Returns:
        `str`: Class of the error, and the innermost line of this package in its traceback.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(Path(name).relative_to(_PACKAGE), line) for name, line in frames if Path(name).is_relative_to(_PACKAGE)]
    if not own:
        return type(error).__name__
    path, line = own[-1]
    return f"{type(error).__name__} ({_PACKAGE.name}/{path.as_posix()}, line {line})"
