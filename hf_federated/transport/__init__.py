"""Split models over a network: a server process and its clients, over gRPC with TLS on both sides (extra `split`).

On the server, a [`SplitServer`] is given what answers a client's messages; on a client, a [`GrpcLink`] takes the place
of a [`~split.LocalLink`], inside a [`~hf_federated.security.encrypted_link.EncryptedLink`] where messages are sealed as well. Neither knows what the
bytes are for. gRPC is imported when one of them is made.
"""

from .client import GrpcLink
from .credentials import TlsCredentials
from .errors import (
    AnswerTimeoutError,
    ClientRefusedError,
    LinkError,
    ServerFailedError,
    ServerUnreachableError,
    SessionLostError,
)
from .server import SplitServer


__all__ = [
    "AnswerTimeoutError",
    "ClientRefusedError",
    "GrpcLink",
    "LinkError",
    "ServerFailedError",
    "ServerUnreachableError",
    "SessionLostError",
    "SplitServer",
    "TlsCredentials",
]
