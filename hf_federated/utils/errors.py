"""Errors that commands recognize without an import of the modules that raise them."""

from __future__ import annotations

from typing import ClassVar


class UserError(RuntimeError):
    """
    An error that the user can correct. A command prints its message without a traceback.

    Attributes:
        exit_code (`int`): The exit code of a command that ends with this error.
    """

    exit_code: ClassVar[int] = 2


class RoundFailedError(RuntimeError):
    """
    Too few clients sent a valid reply. Checkpoints of earlier rounds are unchanged.

    If clients stay away, resume with a smaller `min_clients`. If their updates were rejected, the message has the
    first reason.
    """


class IncompleteRowError(ValueError):
    """A row has no text, no label or no client. The message has the number of the row."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, or the run that resumes from it has other settings or data."""
