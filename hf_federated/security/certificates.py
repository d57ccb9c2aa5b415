"""
Certificates for mutual TLS between the clients and the server of a split model.

A folder holds a private certificate authority and the certificates that the authority signed:

    ca.pem, ca.key                        the authority; its key can sign certificates of new clients
    server.pem, server.key                valid for the host names and addresses of the server
    clients/<id>.pem, clients/<id>.key    one pair for each client; the common name is the client id

A party needs `ca.pem` and its own two files only. In gRPC, `ssl_server_credentials(..., require_client_auth=True)`
refuses clients without a certificate of this authority, and `context.auth_context()["x509_common_name"]` is the client
id. The keys are RSA keys, so they can also serve as [`~hf_federated.security.keys.Identity`].
[`client_fingerprints`] and [`~hf_federated.security.keys.fingerprint`] read the fingerprints from the certificates.
The extended key usage separates the roles: a client certificate is not valid for a server, nor a server certificate
for a client.

Certificates cannot be revoked. To refuse a client, remove its id from the clients of the server. Keys are written
without a password and only their owner can read them (POSIX mode 0600).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.client_names import escape_client_id
from ..utils.storage import write_private
from .keys import (
    DEFAULT_RSA_BITS,
    check_rsa_bits,
    fingerprint,
    generate_rsa_key,
    pem_errors,
    require_cryptography,
)


if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, Name


# The X.509 limit of a common name (RFC 5280, appendix A).
MAX_CLIENT_ID_BYTES = 64

MAX_DAYS = 36500

# The validity of a certificate begins an hour before its creation, so that a peer whose clock is slow accepts it.
_CLOCK_SKEW = datetime.timedelta(hours=1)

_DNS_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*", re.IGNORECASE)


def create_certificates(
    folder: str | os.PathLike[str],
    server_names: Sequence[str] = (),
    clients: Sequence[str] = (),
    *,
    days: int = 365,
    ca_days: int = 3650,
    rsa_bits: int = DEFAULT_RSA_BITS,
    overwrite: bool = False,
) -> list[Path]:
    """
    Create certificates and keys for a server, for clients, or for both.

    If the folder has no certificate authority, the function creates one. Otherwise the existing authority signs, so
    clients can be added later.

    Args:
        folder (`str` or `os.PathLike`): Folder of the files. Created if it does not exist.
        server_names (`Sequence[str]`, *optional*): Host names and IP addresses under which clients reach the server.
            Without names, no server certificate is created.
        clients (`Sequence[str]`, *optional*): Client ids, each of at most 64 bytes in UTF-8.
        days (`int`, *optional*, defaults to `365`): Validity of the server and client certificates, in days.
        ca_days (`int`, *optional*, defaults to `3650`): Validity of a new authority, in days.
        rsa_bits (`int`, *optional*, defaults to `3072`): Size of new keys in bits, from 2048 to 8192.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to replace existing certificates and keys of the
            server and of clients. The authority is never replaced.

    Returns:
        `list[Path]`: Paths of the written certificates. The list contains the certificate of the authority if the
        authority is new.

    Raises:
        ImportError: If `cryptography` (extra `network`) is not installed.
        TypeError: If `server_names` or `clients` is a string.
        ValueError: If a name or number is not allowed, or the authority in the folder cannot sign.
        FileExistsError: If a file exists and `overwrite` is `False`. Nothing is written in this case.

    Example:

    ```python
    >>> from hf_federated.security.certificates import client_fingerprints, create_certificates

    >>> [path.name for path in create_certificates("tls", ["localhost"], ["north", "south"], rsa_bits=2048)]
    ['ca.pem', 'server.pem', 'north.pem', 'south.pem']
    >>> client_fingerprints("tls")
    {'north': 'sha256:...', 'south': 'sha256:...'}

    ```
    """
    require_cryptography("create_certificates")
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    for name, given in {"server_names": server_names, "clients": clients}.items():
        # A string is a sequence too: each of its characters would be a name.
        if isinstance(given, str):
            raise TypeError(f"{name} is the string {given!r}. Pass a list: [{given!r}].")
    check_rsa_bits(rsa_bits)
    for name, value in {"days": days, "ca_days": ca_days}.items():
        if not 1 <= value <= MAX_DAYS:
            raise ValueError(f"{name}={value} is not allowed. Set it to 1 to {MAX_DAYS}.")
    addresses = [_general_name(name) for name in server_names]
    _check_clients(clients)
    if not addresses and not clients:
        raise ValueError("There is no certificate to create. Pass server_names, clients, or both.")
    root = Path(folder)
    # The client id of each certificate to create. `None` is the server.
    requested: dict[Path, str | None] = {root / "server.pem": None} if addresses else {}
    requested |= {client_certificate(root, client): client for client in clients}
    existing = [
        path for certificate in requested for path in (certificate, certificate.with_suffix(".key")) if path.exists()
    ]
    if existing and not overwrite:
        names = ", ".join(str(path) for path in existing)
        raise FileExistsError(f"Files exist: {names}. Choose another folder or other clients, or overwrite the files.")
    written = _create_authority(root, days, ca_days, rsa_bits)
    authority, authority_key = load_authority(root, days)
    for certificate, client in requested.items():
        key = generate_rsa_key(rsa_bits)
        builder = _builder(_name(client or "server"), authority.subject, key, days, is_authority=False)
        usage = ExtendedKeyUsageOID.SERVER_AUTH if client is None else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if client is None:
            builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        _write_pair(certificate, key, builder, authority_key)
    return [*written, *requested]


def client_certificate(folder: str | os.PathLike[str], client: str) -> Path:
    """Return the path of a client's certificate. The path of the client's key is the same with the suffix `.key`."""
    return Path(folder) / "clients" / f"{escape_client_id(client)}.pem"


def client_fingerprints(folder: str | os.PathLike[str]) -> dict[str, str]:
    """
    Return the fingerprints of the clients' public keys, which a server pins.

    Args:
        folder (`str` or `os.PathLike`): A folder that [`create_certificates`] wrote. Only `clients/*.pem` is read.

    Returns:
        `dict[str, str]`: Fingerprint of each client id, sorted by client id.

    Raises:
        ImportError: If `cryptography` (extra `network`) is not installed.
        ValueError: If a certificate is damaged, or its file name does not match the client id in the certificate.
    """
    require_cryptography("client_fingerprints")
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    fingerprints = {}
    for path in (Path(folder) / "clients").glob("*.pem"):
        pem = path.read_bytes()
        try:
            names = x509.load_pem_x509_certificate(pem).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except pem_errors() as error:
            raise ValueError(f"{path} is not a certificate: {error}. Create the certificate again.") from None
        client = str(names[0].value) if names else ""
        if not client or client_certificate(folder, client) != path:
            raise ValueError(f"{path} is the certificate of {client!r}. Rename the file to match the client id.")
        fingerprints[client] = fingerprint(pem)
    return dict(sorted(fingerprints.items()))


def _check_clients(clients: Sequence[str]) -> None:
    for client in clients:
        escape_client_id(client)
        if not client.isprintable():
            raise ValueError(f"The client id {client!r} has characters that cannot be printed. Remove them.")
        size = len(client.encode())
        if size > MAX_CLIENT_ID_BYTES:
            raise ValueError(
                f"The client id {client!r} has {size} bytes in UTF-8, but a certificate holds at most"
                f" {MAX_CLIENT_ID_BYTES} bytes. Choose a shorter id."
            )
    duplicates = sorted({client for client in clients if clients.count(client) > 1})
    if duplicates:
        raise ValueError(f"Duplicate client ids: {', '.join(duplicates)}. Give each client its own id.")


def _general_name(name: str) -> GeneralName:
    """Convert a host name or IP address to the form that a certificate holds."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _DNS_NAME.fullmatch(name) or len(name) > 253:
        raise ValueError(
            f"The server name {name!r} is not a host name or an IP address, such as split.example.org, 10.0.0.7 or"
            " ::1. Remove scheme, port and brackets. Write a name with non-ASCII letters in its xn-- form."
        )
    return x509.DNSName(name)


def _name(common_name: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: Name, issuer: Name, key: RSAPrivateKey, days: int, is_authority: bool) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + datetime.timedelta(days=days))
    constraints = x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None)
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _create_authority(folder: Path, days: int, ca_days: int, rsa_bits: int) -> list[Path]:
    """Create the authority if the folder has none. Return the path of the new certificate, or an empty list."""

    certificate, key_path = folder / "ca.pem", folder / "ca.key"
    if certificate.exists() and key_path.exists():
        return []
    if certificate.exists() or key_path.exists():
        existing, missing = (certificate, key_path) if certificate.exists() else (key_path, certificate)
        raise ValueError(f"{existing} exists, but {missing.name} does not. Restore it, or choose another folder.")
    if days > ca_days:
        raise ValueError(
            f"days={days}, but the authority is valid for ca_days={ca_days} days. Reduce days, or raise ca_days."
        )
    key = generate_rsa_key(rsa_bits)
    name = _name("hf-federated split CA")
    _write_pair(certificate, key, _builder(name, name, key, ca_days, is_authority=True), key)
    return [certificate]


def load_authority(folder: Path, days: int) -> tuple[Certificate, RSAPrivateKey]:
    """
    Load the authority of a folder.

    Args:
        folder (`Path`): The folder with `ca.pem` and `ca.key`.
        days (`int`): Number of days for which new certificates are valid.

    Raises:
        ValueError: If the authority is damaged, or expires before certificates that are valid for `days` days.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        public_key = certificate.public_key()
        key = load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    except pem_errors() as error:
        raise ValueError(
            f"ca.pem or ca.key in {folder} cannot be read: {error}. Restore the file, or choose another folder."
        ) from None
    if not isinstance(key, RSAPrivateKey) or key.public_key() != public_key:
        raise ValueError(f"ca.key in {folder} is not the key of ca.pem. Restore the matching file.")
    remaining = certificate.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
    # Some minutes of tolerance: a new authority may be created with ca_days equal to days.
    if remaining < datetime.timedelta(days=days) - datetime.timedelta(minutes=10):
        raise ValueError(
            f"The authority in {folder} expires in {remaining.days} days, before a certificate that is valid for"
            f" {days} days. Set days to a smaller number, or create a new authority in another folder."
        )
    return certificate, key


def _write_pair(
    certificate_path: Path, key: RSAPrivateKey, builder: CertificateBuilder, authority_key: RSAPrivateKey
) -> None:
    """Sign a certificate. Write the key and then the certificate, so that no certificate exists without its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    subject_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(subject_id, critical=False).add_extension(authority_id, critical=False)
    certificate = builder.sign(authority_key, hashes.SHA256())
    certificate_path.parent.mkdir(parents=True, exist_ok=True)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(certificate_path.with_suffix(".key"), pem)
    write_private(certificate_path, certificate.public_bytes(Encoding.PEM), mode=0o644)
