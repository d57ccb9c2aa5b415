"""Who a party of a split model is to others over TLS, and what may go without."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..security.certificates import client_certificate


def require_grpc(user: str) -> Any:
    """
    The module `grpc`.

    Args:
        user (`str`): What needs it.

    Raises:
        ImportError: With the extra that brings it, if it is not installed.
    """
    if importlib.util.find_spec("grpc") is None:
        raise ImportError(f"{user} needs grpcio. Install it with: pip install 'hf-federated[split]'")
    import grpc

    return grpc


@dataclass(frozen=True)
class TlsCredentials:
    """
    A party's certificate and key, and the authority whose certificates it takes from the other side.

    Args:
        certificate (`bytes`): PEM.
        key (`bytes`): PEM, without a password. It stands in no text form of the object.
        authority (`bytes`): PEM of the authority's certificate.

    Raises:
        ValueError: If one of them is no PEM of its kind.

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
        for name, mark in (("certificate", b"CERTIFICATE-----"), ("key", b"PRIVATE KEY-----"), ("authority", b"")):
            if (mark or b"CERTIFICATE-----") not in getattr(self, name):
                raise ValueError(f"{name} is no PEM of its kind: `hf-federated certificates` writes such files.")

    @classmethod
    def of_server(cls, folder: str | os.PathLike[str]) -> TlsCredentials:
        """The server's, of a folder that `hf-federated certificates` wrote."""
        return cls.from_files(Path(folder) / "server.pem", Path(folder) / "ca.pem")

    @classmethod
    def of_client(cls, folder: str | os.PathLike[str], client_id: str) -> TlsCredentials:
        """A client's, of a folder that `hf-federated certificates` wrote."""
        return cls.from_files(client_certificate(folder, client_id), Path(folder) / "ca.pem")

    @classmethod
    def from_files(
        cls,
        certificate: str | os.PathLike[str],
        authority: str | os.PathLike[str],
        key: str | os.PathLike[str] | None = None,
    ) -> TlsCredentials:
        """
        Read the files.

        Args:
            certificate (`str` or `os.PathLike`): The party's own.
            authority (`str` or `os.PathLike`): The authority's.
            key (`str` or `os.PathLike`, *optional*): By default beside the certificate, ending in `.key`.
        """
        key_path = Path(certificate).with_suffix(".key") if key is None else Path(key)
        return cls(Path(certificate).read_bytes(), key_path.read_bytes(), Path(authority).read_bytes())


def check_credentials(credentials: TlsCredentials | None, insecure: bool, address: str) -> None:
    """
    Raises:
        ValueError: If there is neither TLS nor the explicit wish to do without, or the address is reached by others.
    """
    host = host_of(address)
    if (credentials is None) is not insecure:
        raise ValueError(
            "Give either credentials or insecure=True: without TLS anybody who reaches the address is any client."
        )
    if insecure and not _is_loopback(host):
        raise ValueError(f"insecure=True is for loopback addresses such as 127.0.0.1, and {host!r} is none: use TLS.")


def host_of(address: str) -> str:
    """
    The host of `host:port`.

    Raises:
        ValueError: If the address has another form.
    """
    host, colon, port = address.rpartition(":")
    if not host or not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"The address {address!r} is not of the form host:port, such as split.example.org:50051.")
    return host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
