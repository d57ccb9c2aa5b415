"""What goes wrong on the way to a server, and what the server refuses."""

from __future__ import annotations


class LinkError(RuntimeError):
    """
    A link to a server that is of no use any more. Whether the server carried out the message under way is not known,
    so nothing goes on as if it had: make a new link and resume from a checkpoint.
    """


class ClientRefusedError(LinkError):
    """The server refuses the client: its certificate or id, or because the two do not agree on the model."""


class ServerUnreachableError(LinkError):
    """Nobody answers at the server's address, or nobody that this client trusts or that trusts it."""


class SessionLostError(LinkError):
    """The server does not know the client's session: it was started anew, or gave the client up."""


class AnswerTimeoutError(LinkError, TimeoutError):
    """The server lives, and did not answer a message in time."""


class ServerFailedError(RuntimeError):
    """The server failed while it answered a message, for a reason that only its log tells. The link goes on."""


class RequestRejectedError(Exception):
    """
    What the server's side of the protocol refuses.

    Args:
        code (`str`): Name of the `grpc.StatusCode` that says it.
        text (`str`): For the client's user.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code
