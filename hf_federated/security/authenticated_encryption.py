"""
Authenticated encryption (AES-256-GCM) of the messages of one direction of one key epoch.

The module defines the nonces, the order of the messages and the limits of a key. An encrypted message consists of the
nonce (12 bytes), the encrypted payload and the tag (16 bytes), 28 bytes more than the payload.

    nonce = direction (1 bit) | epoch (31 bits) | steps in the epoch (32 bits) | number of the message (32 bits)

No part of the nonce is random. The message number counts the messages of a direction and epoch from 0, and each
direction of each epoch has its own key, so a nonce never repeats under the same key. The direction bit only serves to
recognize a reflected message. The tag authenticates session id, nonce, kind and payload. The session id and the kind
are not transmitted.
"""

from __future__ import annotations

import struct

from .handshake import EpochKeys
from .keys import EncryptionError


# Types of payloads and encrypted messages.
Buffer = bytes | bytearray | memoryview

NONCE_BYTES = 12
TAG_BYTES = 16

# Encryption adds these bytes to a payload.
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES

# The limit of one call of `cryptography`.
MAX_PAYLOAD_BYTES = 2**31 - 1

# The message number has 32 bits. The last 16 numbers are reserved for key rotation, which must always be possible.
MAX_MESSAGES = 2**32 - 16

# The advantage of an attacker over guessing is at most (blocks + messages)² / 2^129 (draft-irtf-cfrg-aead-limits,
# section 5.1.1). With this limit the advantage is 2^-57, the target of TLS 1.3. The limit corresponds to 1 TiB for
# each key. A limit on the number of messages would not guarantee it, since a message can have several MiB.
MAX_BLOCKS = 2**36
BLOCK_BYTES = 16

_NONCE = struct.Struct(">III")
_SERVER_BIT = 1 << 31


class MessageError(EncryptionError):
    """Raised when an encrypted message is rejected. The session is unchanged and still accepts the correct message."""


class RepeatedMessageError(MessageError):
    """Raised when the most recently opened message arrives again. Send the same encrypted answer again."""


class RotationDueError(EncryptionError):
    """Raised when the keys reached their limit. Rotate the keys before the next message."""


class DirectionCipher:
    """
    The cipher of one direction of a key epoch. Sender and receiver each have one.

    Args:
        keys ([`~hf_federated.security.handshake.EpochKeys`]): The keys of the epoch. The cipher uses the key of its
            direction.
        from_server (`bool`): `True` for the direction from the server to the client.
        sender (`str`): Name of the sender, for error messages.

    Attributes:
        num_messages (`int`): Number of messages so far, which is also the number of the next message.
        num_blocks (`int`): Number of AES blocks that the key processed so far.
    """

    def __init__(self, keys: EpochKeys, from_server: bool, sender: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(keys.server_to_client if from_server else keys.client_to_server)
        self._session_id = keys.session_id
        self._epoch = keys.epoch
        self._first_word = keys.epoch | (_SERVER_BIT if from_server else 0)
        self._sender = sender
        self.num_messages = 0
        self.num_blocks = 0

    @property
    def is_half_used(self) -> bool:
        """Whether the key reached half of one of its limits."""
        return self.num_messages > MAX_MESSAGES // 2 or self.num_blocks > MAX_BLOCKS // 2

    def check_capacity(self, num_bytes: int) -> None:
        """
        Check that the key may encrypt a payload.

        Args:
            num_bytes (`int`): Size of the payload.

        Raises:
            EncryptionError: If the payload is larger than the largest payload of a message.
            RotationDueError: If the payload exceeds the remaining capacity of the key.
        """
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise EncryptionError(
                f"The payload has {num_bytes} bytes, but a message holds at most {MAX_PAYLOAD_BYTES} bytes. Send the"
                " payload in parts, or use a smaller batch."
            )
        if self.num_messages >= MAX_MESSAGES or self.num_blocks + _num_blocks(num_bytes + TAG_BYTES) > MAX_BLOCKS:
            raise RotationDueError(
                f"The key encrypted {self.num_messages} messages and {self.num_blocks} blocks. Its limits are"
                f" {MAX_MESSAGES} messages and {MAX_BLOCKS} blocks. Rotate the keys before the next message."
            )

    def seal(self, payload: Buffer, steps: int, kind: bytes) -> bytes:
        """Encrypt a payload as the next message."""
        nonce = _NONCE.pack(self._first_word, steps, self.num_messages)
        encrypted = self._cipher.encrypt(nonce, memoryview(payload).cast("B"), self._session_id + nonce + kind)
        self._count(len(encrypted))
        return nonce + encrypted

    def decrypt(self, sealed: Buffer, kind: bytes, kind_label: str) -> tuple[bytes, int]:
        """
        Decrypt the next message. Call `accept` afterwards to advance to the following message.

        Args:
            sealed (`bytes` or another buffer): The encrypted message.
            kind (`bytes`): The expected kind.
            kind_label (`str`): The expected kind in readable form, for error messages.

        Returns:
            `tuple[bytes, int]`: The payload, and the number of steps in the nonce.

        Raises:
            RepeatedMessageError: If the message is the most recently accepted message.
            MessageError: If the message is not the next message of this kind. The error names the probable reason.
        """
        message = memoryview(sealed).cast("B")
        if len(message) < OVERHEAD_BYTES:
            raise MessageError(
                f"A message of {self._sender!r} has {len(message)} bytes. An encrypted message has at least"
                f" {OVERHEAD_BYTES} bytes, so this message was truncated."
            )
        first_word, steps, number = _NONCE.unpack(message[:NONCE_BYTES])
        self._check_order(first_word, number)
        payload = self._try_decrypt(message, kind)
        if number == self.num_messages and payload is not None:
            return payload, steps
        if payload is not None:
            raise RepeatedMessageError(f"Message {number} of {self._sender!r} arrived again. Send its answer again.")
        raise MessageError(
            f"Message {number} of {self._sender!r} is not authentic: it was changed or truncated, belongs to another"
            f" session or party, or does not have the kind {kind_label}."
        )

    def accept(self, sealed: Buffer) -> None:
        """Mark a decrypted message as received and advance to the next message."""
        self._count(memoryview(sealed).nbytes - NONCE_BYTES)

    def _check_order(self, first_word: int, number: int) -> None:
        """Check, before decryption, that the nonce is the nonce of the next message or of the most recent message."""
        if first_word ^ self._first_word == _SERVER_BIT:
            raise MessageError(
                f"A message to {self._sender!r} arrived as a message of {self._sender!r}: it was reflected."
            )
        if first_word != self._first_word:
            epoch = first_word & ~_SERVER_BIT
            raise MessageError(
                f"A message of {self._sender!r} belongs to key epoch {epoch}, but the session is in epoch"
                f" {self._epoch}."
            )
        if number > self.num_messages:
            raise MessageError(
                f"Message {number} of {self._sender!r} arrived before message {self.num_messages}: a message was lost,"
                " or messages are out of order. Send the same encrypted messages again in order, or create a new"
                " session."
            )
        if number < self.num_messages - 1:
            raise MessageError(f"Message {number} of {self._sender!r} was opened before: it was replayed.")

    def _try_decrypt(self, message: memoryview, kind: bytes) -> bytes | None:
        """Decrypt a message. Return `None` if the tag does not match."""
        from cryptography.exceptions import InvalidTag

        nonce = bytes(message[:NONCE_BYTES])
        try:
            return self._cipher.decrypt(nonce, message[NONCE_BYTES:], self._session_id + nonce + kind)
        except InvalidTag:
            return None

    def _count(self, encrypted_bytes: int) -> None:
        # The tag adds one block for each message, which covers the messages in the bound of MAX_BLOCKS.
        self.num_blocks += _num_blocks(encrypted_bytes)
        self.num_messages += 1


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)
