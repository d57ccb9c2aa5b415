"""`Credentials`: the identity with which a client signs, and the identities of the other clients that it trusts."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ..security.keys import (
    DEFAULT_RSA_BITS,
    Identity,
    check_fingerprint,
    fingerprint_of,
    generate_rsa_key,
    is_signed,
    require_cryptography,
)


class Credentials:
    """
    Signs the messages of a client, and verifies those of other clients.

    Args:
        identity ([`~hf_federated.security.keys.Identity`]): The client's signing key, such as the key of its
            certificate.
        fingerprints (`Mapping[str, str]`, *optional*): Fingerprints of the clients, by client id. `None` accepts every
            identity, so that a dishonest server can pretend to be
            each client.

    Raises:
        ValueError: If a fingerprint has another form.
    """

    def __init__(self, identity: Identity, fingerprints: Mapping[str, str] | None) -> None:
        for client_id, fingerprint in (fingerprints or {}).items():
            check_fingerprint(fingerprint, client_id)
        self.identity = identity
        self.fingerprints = fingerprints

    def describe(self) -> str:
        """Return whose signatures the client trusts, as text."""
        if self.fingerprints is None:
            return "any (pins='none')"
        return ", ".join(f"{name}={self.fingerprints[name]}" for name in sorted(self.fingerprints))

    def sign(self, content: bytes) -> bytes:
        """Return the signature of the client."""
        return self.identity.sign(content)

    def problem(self, client_id: str, identity: bytes, content: bytes, signature: bytes) -> str | None:
        """
        Check a signature of another client.

        Args:
            client_id (`str`): Id of the client.
            identity (`bytes`): Its public key, as DER.
            content (`bytes`): The signed content.
            signature (`bytes`): The signature.

        Returns:
            `str`, *optional*: What is wrong, as the predicate of a sentence.
        """
        if self.fingerprints is not None:
            pinned = self.fingerprints.get(client_id)
            if pinned is None:
                return f"contains client {client_id!r}, whose fingerprint is not known"
            if fingerprint_of(identity) != pinned:
                return f"contains another certificate of client {client_id!r} than the known one"
        if not self.is_signed(content, signature, identity):
            return f"contains a signature of client {client_id!r} that is not valid"
        return None

    @staticmethod
    def is_signed(content: bytes, signature: bytes, identity: bytes) -> bool:
        """Whether the owner of an identity, a public key as DER, signed a content."""
        try:
            return is_signed(content, signature, identity)
        except ValueError:  # The identity is no key.
            return False


@functools.cache
def simulated_key() -> str:
    """Return the key that signs for all clients of a simulation, as PEM. It is generated once for each process."""
    require_cryptography("Secure aggregation")
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = generate_rsa_key(DEFAULT_RSA_BITS)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


@functools.lru_cache(maxsize=1)
def simulated_identity(key: str | None = None) -> Identity:
    """
    Return the identity that signs for all clients of a simulation.

    Args:
        key (`str`, *optional*): The key of another process, as PEM. Defaults to the key of this process.
    """
    return Identity.from_pem("simulated clients", (key or simulated_key()).encode())
