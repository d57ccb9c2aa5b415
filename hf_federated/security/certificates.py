"""Certificates for TLS between clients and the server of a split model, in which both sides prove who they are.

A folder holds a certificate authority of its own and what it signed:

    ca.pem, ca.key                        the authority; whoever has the key can make clients
    server.pem, server.key                for the names and addresses under which the server is reached
    clients/<id>.pem, clients/<id>.key    one for each client; its common name is the client id

A party needs `ca.pem`, its own two files, and nothing else. With gRPC, `ssl_server_credentials(...,
require_client_auth=True)` refuses whoever has no certificate of this authority, and
`context.auth_context()["x509_common_name"]` is the client id. The keys are RSA, so that they serve as the parties'
[`~split.keys.Identity`] too, whose fingerprints [`client_fingerprints`] and [`~split.keys.fingerprint`] read from the
certificates. A client's certificate is no server's and the reverse: their extended key usage says so.

Nothing is revoked: a server that is to refuse a client leaves its id out of those it knows. Keys are written without a
password, readable by their owner alone (POSIX mode 0600).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_federated.security.keys import (
    DEFAULT_RSA_BITS,
    check_rsa_bits,
    fingerprint,
    generate_rsa_key,
    require_cryptography,
)
from hf_federated.utils.client_names import escape_client_id


if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, KeyUsage, Name


# X.509 allows no more in a common name (RFC 5280, appendix A).
MAX_CLIENT_ID_BYTES = 64

MAX_DAYS = 36500

# A certificate is good at once where the other side's clock is behind.
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
    Writes a server's certificate, clients' certificates, or both, and their keys. The certificate authority is made
    if the folder has none; otherwise the one that is there signs, so that clients can be added later.

    Args:
        folder (`str` or `os.PathLike`): Where the files are; made if it does not exist.
        server_names (`Sequence[str]`, *optional*): Host names and IP addresses under which clients reach the server;
            without any, no certificate of a server is made.
        clients (`Sequence[str]`, *optional*): Client ids, each of at most 64 bytes in UTF-8.
        days (`int`, *optional*, defaults to `365`): How long server and clients may use theirs.
        ca_days (`int`, *optional*, defaults to `3650`): How long the authority is good for, if it is made.
        rsa_bits (`int`, *optional*, defaults to `3072`): Size of new keys, from 2048 to 8192.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to replace certificates and keys of the server and
            of clients. The authority is never replaced.

    Returns:
        `list[Path]`: The certificates that were written, the authority's among them if it is new.

    Raises:
        ImportError: If `cryptography` (extra `split`) is not installed.
        TypeError: If a text is given in place of a list.
        ValueError: If a name or number is not allowed, or the authority in the folder cannot sign.
        FileExistsError: If a file is there already and `overwrite` is `False`. Nothing is written then.

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
        if isinstance(given, str):  # whose letters would be as many names
            raise TypeError(f"{name} is the text {given!r}. Give a list: [{given!r}].")
    check_rsa_bits(rsa_bits)
    _check_days(days=days, ca_days=ca_days)
    addresses = [_general_name(name) for name in server_names]
    _check_clients(clients)
    if not addresses and not clients:
        raise ValueError("There is nothing to make: give the server's names, client ids, or both.")
    place = Path(folder)
    # The client of each certificate to be written; `None` is the server.
    wanted: dict[Path, str | None] = {place / "server.pem": None} if addresses else {}
    wanted |= {client_certificate(place, client): client for client in clients}
    there = [
        path for certificate in wanted for path in (certificate, certificate.with_suffix(".key")) if path.exists()
    ]
    if there and not overwrite:
        names = ", ".join(str(path) for path in there)
        raise FileExistsError(f"Already there: {names}. Choose another folder or other clients, or overwrite them.")
    written = _make_authority(place, days, ca_days, rsa_bits)
    authority, authority_key = _load_authority(place, days)
    for certificate, client in wanted.items():
        key = generate_rsa_key(rsa_bits)
        builder = _builder(_name(client or "server"), authority.subject, key, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
        usage = ExtendedKeyUsageOID.SERVER_AUTH if client is None else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if client is None:
            builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        _write_pair(certificate, key, _signed(builder, key, authority_key))
    return [*written, *wanted]


def client_certificate(folder: str | os.PathLike[str], client: str) -> Path:
    """Where a client's certificate is in a folder of certificates; its key is beside it and ends in `.key`."""
    return Path(folder) / "clients" / f"{escape_client_id(client)}.pem"


def client_fingerprints(folder: str | os.PathLike[str]) -> dict[str, str]:
    """
    The fingerprints of the clients' public keys, for a server to pin.

    Args:
        folder (`str` or `os.PathLike`): What [`create_certificates`] wrote, or as much of it as `clients/*.pem`.

    Returns:
        `dict[str, str]`: By client id, in order.

    Raises:
        ImportError: If `cryptography` (extra `split`) is not installed.
        ValueError: If a certificate is damaged or not where the client's belongs.
    """
    require_cryptography("client_fingerprints")
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    found = {}
    for path in (Path(folder) / "clients").glob("*.pem"):
        pem = path.read_bytes()
        try:
            names = x509.load_pem_x509_certificate(pem).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except ValueError as error:
            raise ValueError(f"{path} is no certificate: {error}") from None
        client = str(names[0].value) if names else ""
        if not client or client_certificate(folder, client) != path:
            raise ValueError(f"{path} is the certificate of {client!r}. Put the file where the client's belongs.")
        found[client] = fingerprint(pem)
    return dict(sorted(found.items()))


def _check_days(**given: int) -> None:
    for name, value in given.items():
        if not 1 <= value <= MAX_DAYS:
            raise ValueError(f"{name} is {value}; allowed are 1 to {MAX_DAYS}.")


def _check_clients(clients: Sequence[str]) -> None:
    for client in clients:
        escape_client_id(client)
        if not client.isprintable():
            raise ValueError(f"The client id {client!r} has characters that cannot be printed. Leave them out.")
        size = len(client.encode())
        if size > MAX_CLIENT_ID_BYTES:
            raise ValueError(
                f"The client id {client!r} has {size} bytes in UTF-8; a certificate holds {MAX_CLIENT_ID_BYTES} at"
                " most. Give the client a shorter id."
            )
    twice = sorted({client for client in clients if clients.count(client) > 1})
    if twice:
        raise ValueError(f"Client ids that are given twice: {', '.join(twice)}. Give each client an id of its own.")


def _general_name(name: str) -> GeneralName:
    """A host name or IP address as a certificate holds it."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not _DNS_NAME.fullmatch(name) or len(name) > 253:
        raise ValueError(
            f"The server's name {name!r} is no host name or IP address, such as split.example.org, 10.0.0.7 or ::1."
            " Leave out scheme, port and brackets; write other letters than ASCII in their xn-- form."
        )
    return x509.DNSName(name)


def _name(common_name: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: Name, issuer: Name, key: RSAPrivateKey, days: int) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _CLOCK_SKEW).not_valid_after(now + datetime.timedelta(days=days))


def _key_usage(signs_certificates: bool) -> KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: CertificateBuilder, key: RSAPrivateKey, authority_key: RSAPrivateKey) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    issuers = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    builder = builder.add_extension(own, critical=False).add_extension(issuers, critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _make_authority(folder: Path, days: int, ca_days: int, rsa_bits: int) -> list[Path]:
    """Makes the authority if there is none; returns its certificate if it is new."""
    from cryptography import x509

    certificate, key_path = folder / "ca.pem", folder / "ca.key"
    if certificate.exists() and key_path.exists():
        return []
    if certificate.exists() or key_path.exists():
        there, missing = (certificate, key_path) if certificate.exists() else (key_path, certificate)
        raise ValueError(f"{there} is there, but not {missing.name}. Put it back, or choose another folder.")
    if days > ca_days:
        raise ValueError(f"days is {days}, more than the authority's ca_days, {ca_days}. Give at most as many.")
    key = generate_rsa_key(rsa_bits)
    name = _name("hf-federated split CA")
    builder = _builder(name, name, key, ca_days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    _write_pair(certificate, key, _signed(builder, key, key))
    return [certificate]


def _load_authority(folder: Path, days: int) -> tuple[Certificate, RSAPrivateKey]:
    """
    The authority in a folder.

    Raises:
        ValueError: If it is damaged, or ends before what it is to sign.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"ca.pem or ca.key in {folder} cannot be read: {error}") from None
    if not isinstance(key, RSAPrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError(f"ca.key in {folder} is not the key of ca.pem. Put the right one back.")
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.timezone.utc)
    # A new authority may be made for as many days as what it signs.
    if left < datetime.timedelta(days=days) - datetime.timedelta(minutes=10):
        raise ValueError(
            f"The authority in {folder} ends in {left.days} days, before certificates of {days} days. Give fewer days,"
            " or make a new authority in another folder."
        )
    return certificate, key


def _write_pair(certificate_path: Path, key: RSAPrivateKey, certificate: Certificate) -> None:
    """Writes the key first, so that a certificate that is there has its key."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    certificate_path.parent.mkdir(parents=True, exist_ok=True)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(certificate_path.with_suffix(".key"), pem, 0o600)
    _write(certificate_path, certificate.public_bytes(Encoding.PEM), 0o644)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Writes a file whole or not at all; at no time can others read what `mode` hides from them."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
