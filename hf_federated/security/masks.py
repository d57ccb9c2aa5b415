"""
The cryptography of a masked sum: key agreement between two clients, masks from keys, and sealed messages.

[Practical Secure Aggregation](https://dl.acm.org/doi/10.1145/3133956.3133982) (Bonawitz et al., CCS 2017), section 3:
two clients agree on a secret by X25519 (RFC 7748), and keys are derived from the secret by HKDF-SHA256 (RFC 5869). A
mask is the key stream of AES-256 in counter mode (NIST SP 800-38A), which is added to a vector modulo 2^32 or 2^16.
One client of a pair adds the mask and the other client subtracts it. Messages that the server forwards are sealed
with AES-256-GCM.

The module does not authenticate the public keys. It needs `cryptography`.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from .keys import EncryptionError


KEY_BYTES = 32

_NONCE_BYTES = 12
_TAG_BYTES = 16
# What a sealed message has in addition to the message.
SEAL_BYTES = _NONCE_BYTES + _TAG_BYTES
_KEY_INFO = b"hf-federated secure aggregation 1"

# A key stream is read in pieces of this size, which stay in the cache of a core.
PIECE_BYTES = 2**18
# `update_into` of `cryptography` 42 needs a buffer with these additional bytes.
_ADDITIONAL_BYTES = 15


def generate_exchange_key() -> tuple[bytes, bytes]:
    """Generate a key pair for one session: the private key and the public key, 32 bytes each."""
    private = os.urandom(KEY_BYTES)
    return private, public_of(private)


def public_of(private: bytes) -> bytes:
    """
    Compute the public key of a private key.

    Raises:
        EncryptionError: If the private key does not have 32 bytes.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    _check_key(private, "private key")
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes) -> bytes:
    """
    Compute the secret that two clients share. Each client calls it with its private key and the other's public key.

    Derive keys from the secret by `derive_key`, and do not use the secret as a key.

    Raises:
        EncryptionError: If a key does not have 32 bytes, or the public key is a point that gives the same secret with
            each private key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    _check_key(private, "private key")
    _check_key(public, "public key")
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise EncryptionError(
            f"The public key {public.hex()} gives the same secret with each private key. Use a generated key pair."
        ) from None


def derive_key(secret: bytes, purpose: str, context: bytes) -> bytes:
    """
    Derive a key of 32 bytes from a secret. Another purpose or context gives an independent key.

    Args:
        secret (`bytes`): A shared secret, or random bytes.
        purpose (`str`): What the key is for, for example `"pair"`.
        context (`bytes`): What the key is bound to, for example the digest of a session.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # The length separates purpose and context.
    name = purpose.encode()
    info = _KEY_INFO + len(name).to_bytes(4, "big") + name + context
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


class KeyStream:
    """
    The key stream of AES-256 in counter mode with an initial counter of zero.

    Args:
        key (`bytes`): A key of 32 bytes. Use a key for one stream only.

    Raises:
        EncryptionError: If the key does not have 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        _check_key(key, "key of a mask")
        self._encryptor = Cipher(AES(key), CTR(bytes(16))).encryptor()
        self._zeros = memoryview(bytes(PIECE_BYTES))
        self._buffer = bytearray(PIECE_BYTES + _ADDITIONAL_BYTES)

    def read(self, num_bytes: int) -> np.ndarray:
        """Return the next bytes, at most `PIECE_BYTES`, as a uint8 vector. The next call overwrites the vector."""
        self._encryptor.update_into(self._zeros[:num_bytes], self._buffer)
        return np.frombuffer(self._buffer, np.uint8, num_bytes)


def add_mask(values: torch.Tensor, key: bytes, subtract: bool = False) -> None:
    """
    Add the mask of a key to a vector in place. The sum wraps around, so subtracting the mask restores the vector.

    The mask is the AES-256-CTR key stream with an initial counter of zero, read as little-endian integers. No second
    vector is allocated.

    Args:
        values (`torch.Tensor`): A contiguous vector of shape `(num_values,)` and dtype `int32` or `int16` on the CPU.
        key (`bytes`): A key of 32 bytes. Use a key for one vector only.
        subtract (`bool`, *optional*, defaults to `False`): Subtract the mask instead of adding it.

    Raises:
        EncryptionError: If the key does not have 32 bytes.
        ValueError: If the vector is not contiguous, or has another dtype, shape or device.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.security.masks import add_mask

    >>> north, south = torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([10, 20, 30], dtype=torch.int32)
    >>> add_mask(north, bytes(32))
    >>> add_mask(south, bytes(32), subtract=True)
    >>> (north + south).tolist()
    [11, 22, 33]
    ```
    """
    vector = _unsigned_view(values)
    operation = np.subtract if subtract else np.add
    stream, width = KeyStream(key), vector.itemsize
    for start in range(0, vector.size, PIECE_BYTES // width):
        part = vector[start : start + PIECE_BYTES // width]
        operation(part, stream.read(part.nbytes).view(f"<u{width}"), out=part)


def seal(key: bytes, plaintext: bytes | memoryview, associated: bytes) -> bytearray:
    """
    Encrypt and authenticate a message with AES-256-GCM under a random nonce.

    Args:
        key (`bytes`): A key of 32 bytes, for at most 2^32 messages.
        plaintext (`bytes` or `memoryview`): The message.
        associated (`bytes`): Data that the recipient knows, such as sender and recipient. It is authenticated, and not
            part of the result.

    Returns:
        `bytearray`: The nonce (12 bytes), the encrypted message and the tag (16 bytes).
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    _check_key(key, "key of a sealed message")
    nonce, end = os.urandom(_NONCE_BYTES), _NONCE_BYTES + len(plaintext)
    encryptor = Cipher(AES(key), GCM(nonce)).encryptor()
    encryptor.authenticate_additional_data(associated)
    # A message can have many megabytes, so it is encrypted without a copy.
    sealed = bytearray(end + _TAG_BYTES)
    sealed[:_NONCE_BYTES] = nonce
    with memoryview(sealed) as view:
        encryptor.update_into(plaintext, view[_NONCE_BYTES:])
    encryptor.finalize()
    sealed[end:] = encryptor.tag
    return sealed


def open_sealed(key: bytes, blob: bytes | bytearray | memoryview, associated: bytes) -> bytes:
    """
    Decrypt a message that `seal` encrypted with the same key and associated data.

    Raises:
        EncryptionError: If the message was changed or truncated, or has another key or other associated data.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    _check_key(key, "key of a sealed message")
    if len(blob) < SEAL_BYTES:
        raise EncryptionError(
            f"A sealed message has {len(blob)} bytes. It has at least {SEAL_BYTES} bytes, so this"
            " message was truncated. Send the whole message."
        )
    try:
        view = memoryview(blob)
        return AESGCM(key).decrypt(view[:_NONCE_BYTES], view[_NONCE_BYTES:], associated)
    except InvalidTag:
        raise EncryptionError(
            f"A sealed message of {len(blob)} bytes is not authentic: it was changed or truncated, or it was sealed by"
            " another sender, for another recipient or for another session."
        ) from None


def _check_key(key: bytes, name: str) -> None:
    if len(key) != KEY_BYTES:
        raise EncryptionError(f"A {name} has {len(key)} bytes. It must have {KEY_BYTES} bytes.")


def _unsigned_view(values: torch.Tensor) -> np.ndarray:
    """Return the vector as unsigned integers in the same memory, because sums of unsigned integers wrap around."""
    if values.dtype not in (torch.int32, torch.int16) or values.ndim != 1 or values.device.type != "cpu":
        raise ValueError(
            f"A mask is added to a vector of dtype int32 or int16 on the CPU, but the tensor has shape"
            f" {tuple(values.shape)} and dtype {values.dtype} on {values.device}. Convert the tensor first."
        )
    if not values.is_contiguous():
        raise ValueError(
            "A mask is added in place to a contiguous vector. Call contiguous() first and use its result."
        )
    vector: np.ndarray = values.numpy()
    return vector.view(f"u{vector.itemsize}")
