"""RSA keys of the parties of a split model: who one is (signing), and what a secret is wrapped for (encryption).

The two uses never share a key. An [`Identity`] signs, lives as long as the federation does, and is known to others by
the fingerprint of its public key; the key of a party's TLS certificate serves well. Keys for wrapping are made anew in
each key epoch (`handshake.py`) and forgotten after it.

Signatures are RSA-PSS and wrapping is RSA-OAEP, both with SHA-256 and MGF1 (RFC 8017); all from `cryptography`
(extra `split`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import OAEP, PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey


# Below 2048 bits RSA can be broken with means that exist; above 8192 a peer's key is only there to keep us computing.
MIN_RSA_BITS = 2048
MAX_RSA_BITS = 8192
DEFAULT_RSA_BITS = 3072

# RFC 8446, section 4.4.3, signs in this form too, with other words: neither signature can be taken for the other, and
# 64 spaces can never be the random bytes with which what TLS 1.2 signs begins.
_SIGNATURE_PREFIX = b" " * 64 + b"hf-federated split handshake 1" + b"\0"


class EncryptionError(ValueError):
    """What encryption between the parties of a split model refuses."""


def require_cryptography(user: str) -> None:
    """
    Raises `ImportError`, with the extra that brings it, if `cryptography` is not installed.

    Args:
        user (`str`): What needs it.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ImportError(f"{user} needs cryptography. Install it with: pip install hf-federated[split]")


def check_rsa_bits(rsa_bits: int) -> None:
    """Raises `ValueError` if RSA keys may not have this size."""
    if not MIN_RSA_BITS <= rsa_bits <= MAX_RSA_BITS:
        raise ValueError(f"rsa_bits is {rsa_bits}; allowed are {MIN_RSA_BITS} to {MAX_RSA_BITS}.")


def generate_rsa_key(rsa_bits: int) -> RSAPrivateKey:
    """A fresh RSA key pair; takes a tenth of a second to one second with 3072 bits."""
    from cryptography.hazmat.primitives.asymmetric import rsa

    check_rsa_bits(rsa_bits)
    return rsa.generate_private_key(public_exponent=65537, key_size=rsa_bits)


def encode_public_key(key: RSAPublicKey) -> bytes:
    """The DER of a SubjectPublicKeyInfo (RFC 5280), as it stands in a certificate."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def load_public_key(der: bytes) -> RSAPublicKey:
    """
    The public key that `encode_public_key` wrote.

    Raises:
        EncryptionError: If it is damaged, no RSA key, or of a size that is not allowed.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    try:
        key = load_der_public_key(der)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise EncryptionError(f"Not a public key: {error}") from None
    if not isinstance(key, RSAPublicKey) or not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
        raise EncryptionError(f"Not an RSA public key of {MIN_RSA_BITS} to {MAX_RSA_BITS} bits.")
    return key


def fingerprint_of(public_key: bytes) -> str:
    """`sha256:` and the hex digest of a public key's DER."""
    return f"sha256:{hashlib.sha256(public_key).hexdigest()}"


def fingerprint(pem: bytes) -> str:
    """
    The fingerprint of a party's public key, by which others know it.

    Args:
        pem (`bytes`): The party's certificate or its public key, as PEM.

    Returns:
        `str`: `sha256:` and 64 hex digits: the digest of the key's SubjectPublicKeyInfo, so that a certificate renewed
        with the same key keeps its fingerprint.

    Raises:
        EncryptionError: If it is neither, or the key is no RSA key.
    """
    require_cryptography("fingerprint")
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = (
            x509.load_pem_x509_certificate(pem).public_key()
            if b"BEGIN CERTIFICATE" in pem
            else load_pem_public_key(pem)
        )
    except ValueError as error:
        raise EncryptionError(f"Neither a certificate nor a public key in PEM: {error}") from None
    if not isinstance(key, RSAPublicKey):
        raise EncryptionError("The certificate or public key is not of an RSA key, which a party's identity is.")
    return fingerprint_of(encode_public_key(key))


def check_fingerprint(text: str, party: str) -> None:
    """Raises `ValueError` if a pinned fingerprint is not written as [`fingerprint`] writes it."""
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise ValueError(
            f"The fingerprint given for {party!r} is {text!r}; it is written as 'sha256:' and 64 lower-case hex"
            " digits, as fingerprint() and `hf-federated certificates` do."
        )


class Identity:
    """
    A party's name and the RSA key with which it signs. The private key appears in no text form of the object.

    Args:
        name (`str`): The party's name; for a client its client id.
        private_key (`cryptography.hazmat.primitives.asymmetric.rsa.RSAPrivateKey`): Of 2048 bits or more.

    Raises:
        ValueError: If the name is empty or the key too small.

    Example:

    ```python
    >>> from hf_federated.security.keys import Identity

    >>> north = Identity.generate("north", rsa_bits=2048)
    >>> north
    Identity(name='north', fingerprint='sha256:...')

    ```
    """

    def __init__(self, name: str, private_key: RSAPrivateKey) -> None:
        if not name:
            raise ValueError("The name of an identity is the empty string. Give every party a name.")
        check_rsa_bits(private_key.key_size)
        self.name = name
        self._private_key = private_key
        self.public_key = encode_public_key(private_key.public_key())
        self.fingerprint = fingerprint_of(self.public_key)

    @classmethod
    def generate(cls, name: str, rsa_bits: int = DEFAULT_RSA_BITS) -> Identity:
        """
        An identity with a new key, which is lost with the process.

        Args:
            name (`str`): The party's name.
            rsa_bits (`int`, *optional*, defaults to `3072`): From 2048 to 8192.
        """
        require_cryptography("Identity")
        return cls(name, generate_rsa_key(rsa_bits))

    @classmethod
    def from_pem(cls, name: str, pem: bytes) -> Identity:
        """
        The identity whose private key a file holds, such as the key of the party's TLS certificate.

        Args:
            name (`str`): The party's name.
            pem (`bytes`): An RSA private key without a password, as PEM.

        Raises:
            EncryptionError: If it is anything else.
        """
        require_cryptography("Identity")
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise EncryptionError(
                f"The key of {name!r} is no private key in PEM without a password: {error}"
            ) from None
        if not isinstance(key, RSAPrivateKey):
            raise EncryptionError(f"The key of {name!r} is no RSA key; `hf-federated certificates` makes one.")
        return cls(name, key)

    def sign(self, message: bytes) -> bytes:
        """The RSA-PSS signature of a handshake message, which is good for nothing else."""
        from cryptography.hazmat.primitives import hashes

        return self._private_key.sign(_SIGNATURE_PREFIX + message, _pss(), hashes.SHA256())

    def __repr__(self) -> str:
        return f"Identity(name={self.name!r}, fingerprint={self.fingerprint!r})"


def is_signed(message: bytes, signature: bytes, public_key: bytes) -> bool:
    """Whether the owner of a public key (DER) signed a handshake message."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes

    try:
        load_public_key(public_key).verify(signature, _SIGNATURE_PREFIX + message, _pss(), hashes.SHA256())
    except InvalidSignature:
        return False
    return True


def wrap(secret: bytes, public_key: bytes) -> bytes:
    """RSA-OAEP of a secret of at most 190 bytes (the most under a key of 2048 bits) for the owner of a key (DER)."""
    return load_public_key(public_key).encrypt(secret, _oaep())


def unwrap(wrapped: bytes, private_key: RSAPrivateKey) -> bytes:
    """
    The secret that `wrap` wrapped.

    Raises:
        EncryptionError: If it was wrapped for another key, or changed.
    """
    try:
        return private_key.decrypt(wrapped, _oaep())
    except ValueError:
        raise EncryptionError("A wrapped secret is not for this key, or was changed.") from None


def _pss() -> PSS:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


def _oaep() -> OAEP:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.OAEP(mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=None)
