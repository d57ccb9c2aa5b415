"""What a command refuses, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_federated.data import ConcurrentPushError


class CommandError(ValueError):
    """A command that cannot be carried out. The message is one line: what was given, and what is allowed."""


@contextmanager
def command_errors(where: str) -> Iterator[None]:
    """Turns what a library says about a value into a [`CommandError`] that names where the value was given."""
    try:
        yield
    except CommandError:
        raise
    except (ValueError, TypeError, KeyError, OSError, ImportError, ConcurrentPushError) as error:
        # str() of a KeyError is the repr of its text.
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        raise CommandError(f"{where}: {' '.join(text.split())}") from error
