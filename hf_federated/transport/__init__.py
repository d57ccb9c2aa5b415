"""
Communication of a server process and its clients over gRPC with mutual TLS (extra `network`).

- [`GrpcTransport`] carries the messages of a federation whose clients are on other machines. A client connects with
  [`GrpcConnection`].
- [`CallTransport`] carries these messages over the remote calls of another system, such as NVFlare. A client answers
  the calls with a [`CallEndpoint`].
- [`GrpcServer`] receives the messages of the clients and passes them to a function that returns the answers.
- [`GrpcLink`] connects a client to the server. It replaces a [`~hf_federated.split.LocalLink`], and an
  [`~hf_federated.security.encrypted_link.EncryptedLink`] around it encrypts messages in addition to TLS.
- [`TlsCredentials`] holds the certificate and the key of a party, and the certificate of the authority.
- [`LinkError`] is the base class of the errors that end a link. [`ServerFailedError`] does not end the link.

The transport does not interpret the messages. gRPC is imported when a server or a link is created.
"""

from .base import Connection, Connector, Event, Transport
from .call_endpoint import CallEndpoint
from .call_transport import CallTransport
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
from .grpc_transport import GrpcConnection, GrpcTransport
from .server import GrpcServer


__all__ = [
    "AnswerTimeoutError",
    "CallEndpoint",
    "CallTransport",
    "ClientRefusedError",
    "Connection",
    "Connector",
    "Event",
    "GrpcConnection",
    "GrpcLink",
    "GrpcServer",
    "GrpcTransport",
    "LinkError",
    "ServerFailedError",
    "ServerUnreachableError",
    "SessionLostError",
    "TlsCredentials",
    "Transport",
]
