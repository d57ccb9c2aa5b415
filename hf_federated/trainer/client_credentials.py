"""The identity of a client on another machine, for secure aggregation."""

from __future__ import annotations

from collections.abc import Mapping

from ..secure_aggregation import SecureAggregation
from ..secure_aggregation.credentials import Credentials
from ..security.certificates import client_certificate, client_fingerprints
from ..security.keys import Identity
from ..utils.errors import UserError


class CredentialsError(UserError, ValueError):
    """A client cannot sign or verify the messages of secure aggregation. The message states what to do."""


def client_credentials(
    protocol: SecureAggregation | None,
    client_id: str,
    certificates: str | None,
    fingerprints: Mapping[str, str] | None,
) -> Credentials | None:
    """
    Return the identity of a client and the fingerprints that it knows.

    Args:
        protocol ([`SecureAggregation`], *optional*): The protocol of secure aggregation.
        client_id (`str`): Id of the client.
        certificates (`str`, *optional*): Folder with the certificate and the key of the client. Certificates of other
            clients in it are trusted. By default, the client generates a key.
        fingerprints (`Mapping[str, str]`, *optional*): Fingerprints of other clients, by client id. They take
            precedence over the certificates in the folder.

    Returns:
        [`Credentials`], *optional*: `None` without secure aggregation.

    Raises:
        CredentialsError: If the protocol requires fingerprints and none is known, or if the protocol uses no masks.
    """
    if protocol is None:
        if fingerprints:
            raise CredentialsError("`fingerprints` has no use without `secure_aggregation`. Leave it out.")
        return None
    if not protocol.masks:
        raise CredentialsError(
            "masks=False is for simulations: the server would learn the update of this client. Leave `masks` out of "
            "`secure_aggregation_kwargs`."
        )
    if certificates is None:
        identity, known = Identity.generate(client_id), dict(fingerprints or {})
    else:
        pem = client_certificate(certificates, client_id).with_suffix(".key").read_bytes()
        identity = Identity.from_pem(client_id, pem)
        known = {**client_fingerprints(certificates), **(fingerprints or {})}
    known.pop(client_id, None)
    if protocol.pins == "none":
        return Credentials(identity, None)
    if not known:
        raise CredentialsError(
            "Secure aggregation needs the fingerprints of the other clients, which the server cannot be trusted to "
            "deliver. Pass `fingerprints` (--peer ID=FINGERPRINT), add the certificates of the other clients to the "
            "folder, or set pins='none' in `secure_aggregation_kwargs` to trust the server with the keys."
        )
    return Credentials(identity, known)
