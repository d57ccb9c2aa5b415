"""What a command refuses, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_federated.data import ConcurrentPushError
from hf_federated.transport import LinkError, ServerFailedError


# What values, files, packages and other machines are not as they should be for.
REFUSED = (
    ValueError,
    TypeError,
    KeyError,
    OSError,
    ImportError,
    ConcurrentPushError,
    LinkError,
    ServerFailedError,
)


class CommandError(ValueError):
    """A command that cannot be carried out. The message is one line: what was given, and what is allowed."""


@contextmanager
def command_errors(where: str) -> Iterator[None]:
    """Turns what a library says about a value into a [`CommandError`] that names where the value was given."""
    try:
        yield
    except CommandError:
        raise
    except REFUSED as error:
        # str() of a KeyError is the repr of its text.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        raise CommandError(f"{where}: {' '.join(text.split())}") from error
