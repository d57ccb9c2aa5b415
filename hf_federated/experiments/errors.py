"""Errors that a command reports to the user in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_federated.utils.errors import UserError


# Errors caused by invalid values, files, packages or remote machines. A command reports them without a traceback.
USER_ERRORS = (
    ValueError,
    TypeError,
    KeyError,
    OSError,
    ImportError,
    UserError,
)


class CommandError(ValueError):
    """A command that cannot be executed. The one-line message states the given value and the allowed values."""


@contextmanager
def command_errors(where: str) -> Iterator[None]:
    """Convert an error from a library into a [`CommandError`] prefixed with `where`, the source of the value."""
    try:
        yield
    except CommandError:
        raise
    except USER_ERRORS as error:
        # str() of a KeyError is the repr of its message.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        raise CommandError(f"{where}: {' '.join(text.split())}") from error
