"""Errors of the transport: failures of a link to the server, and requests that the server rejects."""

from __future__ import annotations

from typing import ClassVar

from ..utils.errors import UserError


# The exit code of a command whose connection to the server ended. The same command continues the run.
CONNECTION_ENDED = 3


class LinkError(UserError):
    """
    Base class of the errors that end a link to a server.

    The client does not know whether the server processed the last message. Create a new link and resume from a
    checkpoint.
    """


class ClientRefusedError(LinkError):
    """Raised when the server refuses the client: wrong certificate, unknown id, or different session settings."""


class ServerUnreachableError(LinkError):
    """Raised when the server does not respond, or when client and server do not trust each other's certificates."""

    exit_code: ClassVar[int] = CONNECTION_ENDED


class SessionLostError(LinkError):
    """Raised when the server does not know the client's session: it was restarted, or the session timed out."""

    exit_code: ClassVar[int] = CONNECTION_ENDED


class AnswerTimeoutError(LinkError, TimeoutError):
    """Raised when the server is alive but does not answer a message in time."""

    exit_code: ClassVar[int] = CONNECTION_ENDED


class ServerFailedError(UserError):
    """Raised when the server fails while it processes a message. Its log has the reason. The link stays usable."""


class RequestRejectedError(Exception):
    """
    Raised on the server for a request that it rejects.

    Args:
        code (`str`): Name of the `grpc.StatusCode` that the client receives.
        text (`str`): Message for the user of the client.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
