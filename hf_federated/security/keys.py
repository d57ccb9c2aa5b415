"""
RSA keys of the parties of a split model: signing keys for authentication, and encryption keys that wrap secrets.

No key serves both uses. An [`Identity`] holds a signing key, which a party keeps as long as the federation exists.
Peers recognize the signing key by the fingerprint of its public key. The key of the party's TLS certificate can be the
signing key. Encryption keys are generated for each key epoch (`handshake.py`) and discarded after the epoch.

Signatures use RSA-PSS and wrapping uses RSA-OAEP, both with SHA-256 and MGF1 (RFC 8017). The implementation is that of
`cryptography` (extra `network`).
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import TYPE_CHECKING

from ..utils.optional_packages import require_packages


if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.padding import OAEP, PSS
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey


# RSA keys below 2048 bits can be broken. A peer's key above 8192 bits costs computing time without a benefit.
MIN_RSA_BITS = 2048
MAX_RSA_BITS = 8192
DEFAULT_RSA_BITS = 3072

# TLS 1.3 signs the same form with another context string (RFC 8446, section 4.4.3), so neither signature is valid as
# the other. The signed content of TLS 1.2 begins with random bytes, which the 64 spaces cannot be.
_SIGNATURE_PREFIX = b" " * 64 + b"hf-federated split handshake 1" + b"\0"


class EncryptionError(ValueError):
    """Raised when encryption between the parties of a run rejects a message, a key or a call."""


def require_cryptography(user: str) -> None:
    """
    Check that `cryptography` is installed.

    Args:
        user (`str`): Name of the class or function that needs `cryptography`, for the error.

    Raises:
        ImportError: If `cryptography` is not installed. The message names the extra to install.
    """
    require_packages(user, {"network": {"cryptography": "cryptography"}})


def check_rsa_bits(rsa_bits: int) -> None:
    """
    Check the size of an RSA key.

    Raises:
        ValueError: If the size in bits is not allowed.
    """
    if not MIN_RSA_BITS <= rsa_bits <= MAX_RSA_BITS:
        raise ValueError(f"rsa_bits={rsa_bits} is not allowed. Set it to {MIN_RSA_BITS} to {MAX_RSA_BITS}.")


def generate_rsa_key(rsa_bits: int) -> RSAPrivateKey:
    """Generate an RSA key pair. With 3072 bits this takes a tenth of a second to one second."""
    from cryptography.hazmat.primitives.asymmetric import rsa

    check_rsa_bits(rsa_bits)
    return rsa.generate_private_key(public_exponent=65537, key_size=rsa_bits)


def encode_public_key(key: RSAPublicKey) -> bytes:
    """Encode a public key as the DER of a SubjectPublicKeyInfo (RFC 5280), the form that certificates contain."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


# A signed session verifies several signatures of each key.
@functools.lru_cache(maxsize=256)
def load_public_key(der: bytes) -> RSAPublicKey:
    """
    Decode a public key that `encode_public_key` encoded.

    Raises:
        EncryptionError: If the bytes are damaged, or the key is not an RSA key of an allowed size.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    try:
        key = load_der_public_key(der)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise EncryptionError(f"The bytes are not a public key in DER form: {error}") from None
    if not isinstance(key, RSAPublicKey) or not MIN_RSA_BITS <= key.key_size <= MAX_RSA_BITS:
        raise EncryptionError(f"The public key is not an RSA key of {MIN_RSA_BITS} to {MAX_RSA_BITS} bits.")
    return key


def fingerprint_of(public_key: bytes) -> str:
    """Return the fingerprint of a public key in DER form: `sha256:` and the hex digest."""
    return f"sha256:{hashlib.sha256(public_key).hexdigest()}"


def pem_errors() -> tuple[type[Exception], ...]:
    """Errors of `cryptography` for PEM files that are damaged or have an unsupported content."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm

    return (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)


def fingerprint(pem: bytes) -> str:
    """
    Return the fingerprint of a party's public key, by which peers recognize the party.

    Args:
        pem (`bytes`): The party's certificate or its public key, as PEM.

    Returns:
        `str`: `sha256:` and 64 hex digits, the digest of the key's SubjectPublicKeyInfo. A certificate that is renewed
        with the same key keeps its fingerprint.

    Raises:
        ImportError: If `cryptography` (extra `network`) is not installed.
        EncryptionError: If `pem` is neither a certificate nor a public key, or the key is not an RSA key.
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
    except pem_errors() as error:
        raise EncryptionError(f"The bytes are neither a certificate nor a public key in PEM: {error}") from None
    if not isinstance(key, RSAPublicKey):
        raise EncryptionError("The key is not an RSA key. An identity needs an RSA key.")
    return fingerprint_of(encode_public_key(key))


def check_fingerprint(text: str, party: str) -> None:
    """
    Check the form of a pinned fingerprint.

    Args:
        text (`str`): The fingerprint, in the form that [`fingerprint`] returns.
        party (`str`): Name of the party that the fingerprint belongs to, for the error.

    Raises:
        ValueError: If the fingerprint has another form.
    """
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", text):
        raise ValueError(
            f"The fingerprint given for {party!r} is {text!r}. A fingerprint is 'sha256:' and 64 lower-case hex"
            " digits, as `hf-federated certificates` prints it."
        )


class Identity:
    """
    A party's name and RSA signing key. `repr` does not show the private key.

    Args:
        name (`str`): Name of the party. The name of a client is its client id.
        private_key (`cryptography.hazmat.primitives.asymmetric.rsa.RSAPrivateKey`): The signing key, of 2048 to 8192
            bits.

    Raises:
        ValueError: If the name is empty or the size of the key is not allowed.

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
            raise ValueError("The name of the identity is the empty string. Give every party a name.")
        check_rsa_bits(private_key.key_size)
        self.name = name
        self._private_key = private_key
        self.public_key = encode_public_key(private_key.public_key())
        self.fingerprint = fingerprint_of(self.public_key)

    @classmethod
    def generate(cls, name: str, rsa_bits: int = DEFAULT_RSA_BITS) -> Identity:
        """
        Create an identity with a new key. The key is lost when the process ends.

        Args:
            name (`str`): Name of the party.
            rsa_bits (`int`, *optional*, defaults to `3072`): Size of the key in bits, from 2048 to 8192.

        Raises:
            ImportError: If `cryptography` (extra `network`) is not installed.
            ValueError: If an argument is not allowed.
        """
        require_cryptography("Identity")
        return cls(name, generate_rsa_key(rsa_bits))

    @classmethod
    def from_pem(cls, name: str, pem: bytes) -> Identity:
        """
        Create an identity from a private key, such as the key of the party's TLS certificate.

        Args:
            name (`str`): Name of the party.
            pem (`bytes`): An RSA private key without a password, as PEM.

        Raises:
            ImportError: If `cryptography` (extra `network`) is not installed.
            EncryptionError: If `pem` is not an RSA private key without a password.
        """
        require_cryptography("Identity")
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem, password=None)
        except pem_errors() as error:
            raise EncryptionError(
                f"The key of {name!r} is not a private key in PEM without a password: {error}"
            ) from None
        if not isinstance(key, RSAPrivateKey):
            raise EncryptionError(f"The key of {name!r} is not an RSA key. `hf-federated certificates` creates one.")
        return cls(name, key)

    def sign(self, message: bytes) -> bytes:
        """Return the RSA-PSS signature of a message of this package. The signature is not valid in other protocols."""
        from cryptography.hazmat.primitives import hashes

        return self._private_key.sign(_SIGNATURE_PREFIX + message, _pss(), hashes.SHA256())

    def __repr__(self) -> str:
        return f"Identity(name={self.name!r}, fingerprint={self.fingerprint!r})"


def is_signed(message: bytes, signature: bytes, public_key: bytes) -> bool:
    """Whether the owner of a public key in DER form signed a message with [`Identity.sign`]."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes

    try:
        load_public_key(public_key).verify(signature, _SIGNATURE_PREFIX + message, _pss(), hashes.SHA256())
    except InvalidSignature:
        return False
    return True


def wrap(secret: bytes, public_key: bytes) -> bytes:
    """
    Encrypt a secret for the owner of a public key with RSA-OAEP.

    Args:
        secret (`bytes`): At most 190 bytes, the limit of a key of 2048 bits.
        public_key (`bytes`): The recipient's public key, as DER.
    """
    return load_public_key(public_key).encrypt(secret, _oaep())


def unwrap(wrapped: bytes, private_key: RSAPrivateKey) -> bytes:
    """
    Decrypt a secret that `wrap` encrypted.

    Raises:
        EncryptionError: If the secret was encrypted for another key, or was changed.
    """
    try:
        return private_key.decrypt(wrapped, _oaep())
    except ValueError:
        raise EncryptionError("The wrapped secret was encrypted for another key, or was changed.") from None


def _pss() -> PSS:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


def _oaep() -> OAEP:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.OAEP(mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=None)
