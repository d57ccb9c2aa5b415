"""AES-256-GCM over the messages of one direction of one key epoch: nonces, order and how much a key may carry.

A sealed message is its nonce (12 bytes), the encrypted payload and the tag (16 bytes), 28 bytes more than the payload.

    nonce = direction (1 bit) | epoch (31 bits) | steps in the epoch (32 bits) | number of the message (32 bits)

Nothing of the nonce is random. The number counts the messages of the direction and epoch from 0, so no key meets a
nonce twice; a direction has its own key, and the direction bit only lets a reflected message be named as one. The tag
covers session, nonce, kind and payload; kind and session do not travel.
"""

from __future__ import annotations

import struct

from hf_federated.security.handshake import EpochKeys
from hf_federated.security.keys import EncryptionError


# What may be sealed and opened.
Buffer = bytes | bytearray | memoryview

NONCE_BYTES = 12
TAG_BYTES = 16

# What sealing adds to a payload.
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES

# The most that one call of `cryptography` encrypts.
MAX_PAYLOAD_BYTES = 2**31 - 1

# The number has 32 bits; the last few are for rotating the keys, which is possible whatever a key has carried.
MAX_MESSAGES = 2**32 - 16

# An attacker's advantage over guessing is at most (blocks + messages)² / 2^129 (draft-irtf-cfrg-aead-limits, section
# 5.1.1), here 2^-57, the target of TLS 1.3. That is 1 TiB for each key; a bound on messages, of several MiB here,
# would not hold it.
MAX_BLOCKS = 2**36
BLOCK_BYTES = 16

_NONCE = struct.Struct(">III")
_SERVER_BIT = 1 << 31


class MessageError(EncryptionError):
    """A sealed message that was refused. The session is as before, and still opens the right one."""


class RepeatedMessageError(MessageError):
    """The message opened last came again, unchanged: send the answer it had again, as the same sealed bytes."""


class RotationDueError(EncryptionError):
    """The keys did what they may: rotate them before the next message."""


class Direction:
    """
    One direction of a key epoch, at either end of it.

    Args:
        keys ([`~split.handshake.EpochKeys`]): The epoch's keys, of which this takes one.
        from_server (`bool`): Which direction it is.
        sender (`str`): Who seals, for messages.
    """

    def __init__(self, keys: EpochKeys, from_server: bool, sender: str) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(keys.server_to_client if from_server else keys.client_to_server)
        self._session_id = keys.session_id
        self._epoch = keys.epoch
        self._first_word = keys.epoch | (_SERVER_BIT if from_server else 0)
        self._sender = sender
        self.number = 0
        self.blocks = 0

    @property
    def half_used(self) -> bool:
        """Whether the key carried half of what it may."""
        return self.number > MAX_MESSAGES // 2 or self.blocks > MAX_BLOCKS // 2

    def check_room(self, num_bytes: int) -> None:
        """
        Raises:
            EncryptionError: If no message may have a payload of that size.
            RotationDueError: If the key may not carry it any more.
        """
        if num_bytes > MAX_PAYLOAD_BYTES:
            raise EncryptionError(
                f"The payload has {num_bytes} bytes; a message has at most {MAX_PAYLOAD_BYTES}. Send it in parts, or"
                " use a smaller batch."
            )
        if self.number >= MAX_MESSAGES or self.blocks + _blocks(num_bytes + TAG_BYTES) > MAX_BLOCKS:
            raise RotationDueError(
                f"The key carried {self.number} messages and {self.blocks} blocks, and may carry {MAX_MESSAGES} and"
                f" {MAX_BLOCKS}: rotate the keys before the next message."
            )

    def seal(self, payload: Buffer, steps: int, kind: bytes) -> bytes:
        """The next message of the direction."""
        nonce = _NONCE.pack(self._first_word, steps, self.number)
        encrypted = self._cipher.encrypt(nonce, memoryview(payload).cast("B"), self._session_id + nonce + kind)
        self._count(len(encrypted))
        return nonce + encrypted

    def decrypt(self, sealed: Buffer, kind: bytes, kind_in_words: str) -> tuple[bytes, int]:
        """
        The payload of the next message, and the steps it brings. The message still has to be accepted.

        Raises:
            RepeatedMessageError: If it is the message accepted last.
            MessageError: If it is not the next message of this kind; says what it seems to be.
        """
        message = memoryview(sealed).cast("B")
        if len(message) < OVERHEAD_BYTES:
            raise MessageError(
                f"A message of {self._sender!r} has {len(message)} bytes and was cut: {OVERHEAD_BYTES} is the least."
            )
        first_word, steps, number = _NONCE.unpack(message[:NONCE_BYTES])
        self._check_place(first_word, number)
        payload = self._payload(message, kind)
        if number == self.number and payload is not None:
            return payload, steps
        if payload is not None:
            raise RepeatedMessageError(f"Message {number} of {self._sender!r} came again. Send its answer again.")
        raise MessageError(
            f"Message {number} of {self._sender!r} is not authentic: it was changed or cut, is of another session or"
            f" party, or is no message of the kind {kind_in_words}."
        )

    def accept(self, sealed: Buffer) -> None:
        """Goes on to the next message."""
        self._count(memoryview(sealed).nbytes - NONCE_BYTES)

    def _check_place(self, first_word: int, number: int) -> None:
        """Refuses what says of itself that it is neither the next message nor the last one again."""
        if first_word ^ self._first_word == _SERVER_BIT:
            raise MessageError(f"A message to {self._sender!r} came back as one of {self._sender!r}: reflected.")
        if first_word != self._first_word:
            epoch = first_word & ~_SERVER_BIT
            raise MessageError(
                f"A message of {self._sender!r} is of key epoch {epoch}; the session is in epoch {self._epoch}."
            )
        if number > self.number:
            raise MessageError(
                f"Message {number} of {self._sender!r} came before message {self.number}: lost or out of order. Send"
                " what was sealed again, in order, or make a new session."
            )
        if number < self.number - 1:
            raise MessageError(f"Message {number} of {self._sender!r} was opened before: replayed.")

    def _payload(self, message: memoryview, kind: bytes) -> bytes | None:
        """`None` if the tag does not fit."""
        from cryptography.exceptions import InvalidTag

        nonce = bytes(message[:NONCE_BYTES])
        try:
            return self._cipher.decrypt(nonce, message[NONCE_BYTES:], self._session_id + nonce + kind)
        except InvalidTag:
            return None

    def _count(self, encrypted_bytes: int) -> None:
        # The tag is a block more, which stands for the message in the bound.
        self.blocks += _blocks(encrypted_bytes)
        self.number += 1


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)
