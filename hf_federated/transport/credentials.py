"""TLS credentials of a party, and the check of connections without TLS."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..security.certificates import client_certificate
from ..utils.optional_packages import require_packages


def require_grpc(user: str) -> Any:
    """
    Import the module `grpc` and return it.

    Args:
        user (`str`): Name of the class that needs gRPC, for the error.

    Raises:
        ImportError: If `grpcio` is not installed. The message names the extra to install.
    """
    require_packages(user, {"network": {"grpc": "grpcio"}})
    import grpc

    return grpc


@dataclass(frozen=True)
class TlsCredentials:
    """
    A party's certificate and key, and the certificate authority that must have signed the peer's certificate.

    Args:
        certificate (`bytes`): The party's certificate, as PEM.
        key (`bytes`): The party's private key without a password, as PEM. `repr` does not show the key.
        authority (`bytes`): The certificate of the authority, as PEM.

    Raises:
        ValueError: If an argument is not a certificate or a private key in PEM format.

    Example:

    ```python
    >>> from hf_federated.security.certificates import create_certificates
    >>> from hf_federated.transport import TlsCredentials

    >>> paths = create_certificates("tls", ["localhost"], ["north"], rsa_bits=2048)
    >>> server, north = TlsCredentials.of_server("tls"), TlsCredentials.of_client("tls", "north")
    >>> server.authority == north.authority, server.certificate == north.certificate
    (True, False)
    ```
    """

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name, kind in (("certificate", "certificate"), ("key", "private key"), ("authority", "certificate")):
            if f"{kind.upper()}-----".encode() not in getattr(self, name):
                raise ValueError(
                    f"{name} is not a {kind} in PEM format. Pass a file that `hf-federated certificates` created."
                )

    @classmethod
    def of_server(cls, folder: str | os.PathLike[str]) -> TlsCredentials:
        """Load the credentials of the server from a folder that `hf-federated certificates` created."""
        return cls.from_files(Path(folder) / "server.pem", Path(folder) / "ca.pem")

    @classmethod
    def of_client(cls, folder: str | os.PathLike[str], client_id: str) -> TlsCredentials:
        """Load the credentials of a client from a folder that `hf-federated certificates` created."""
        return cls.from_files(client_certificate(folder, client_id), Path(folder) / "ca.pem")

    @classmethod
    def from_files(
        cls,
        certificate: str | os.PathLike[str],
        authority: str | os.PathLike[str],
        key: str | os.PathLike[str] | None = None,
    ) -> TlsCredentials:
        """
        Load credentials from PEM files.

        Args:
            certificate (`str` or `os.PathLike`): Path of the party's certificate.
            authority (`str` or `os.PathLike`): Path of the authority's certificate.
            key (`str` or `os.PathLike`, *optional*): Path of the party's private key. Defaults to the path of the
                certificate with the suffix `.key`.
        """
        key_path = Path(certificate).with_suffix(".key") if key is None else Path(key)
        return cls(Path(certificate).read_bytes(), key_path.read_bytes(), Path(authority).read_bytes())


def check_credentials(credentials: TlsCredentials | None, insecure: bool, address: str) -> None:
    """
    Check that a connection without TLS is requested explicitly and uses a loopback address.

    Args:
        credentials ([`TlsCredentials`], *optional*): The credentials of the party.
        insecure (`bool`): Whether the user requests a connection without TLS.
        address (`str`): The address of the server, as `host:port`.

    Raises:
        ValueError: If both or neither of `credentials` and `insecure` are set, or `insecure` is set and the address is
            not a loopback address.
    """
    host = host_of(address)
    if (credentials is None) is not insecure:
        raise ValueError(
            "Pass either credentials or insecure=True. Without TLS, any process that reaches the address can"
            " impersonate any client."
        )
    if insecure and not _is_loopback(host):
        raise ValueError(
            f"insecure=True requires a loopback address such as 127.0.0.1, but the host is {host!r}. Pass credentials."
        )


def host_of(address: str) -> str:
    """
    Return the host of an address of the form `host:port`.

    Raises:
        ValueError: If the address has another form.
    """
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"The address {address!r} does not have the form host:port, such as split.example.org:50051.")
    return host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
