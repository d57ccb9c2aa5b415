"""What both sides of an encrypted session do: encrypt and decrypt the messages of a key epoch, and count its steps.

`encrypted_session.py` describes the session, its threat model, and the rotation of the keys.
"""

from __future__ import annotations

import os
import threading
from typing import Any, ClassVar, NoReturn

from .authenticated_encryption import Buffer, DirectionCipher, MessageError, RotationDueError
from .handshake import EpochKeys, Parties
from .keys import (
    DEFAULT_RSA_BITS,
    EncryptionError,
    Identity,
    check_fingerprint,
    check_rsa_bits,
    require_cryptography,
)


# First byte of the authenticated kind. It separates payloads from the messages of a rotation.
_ROTATION = b"\0"
_PAYLOAD = b"\1"


class Session:
    """
    Base class of [`ClientSession`] and [`ServerSession`]: encrypts and decrypts messages.

    The methods are thread-safe. Messages must arrive in the order in which they were encrypted.

    Args:
        identity ([`~hf_federated.security.keys.Identity`]): This party's name and signing key.
        peer (`str`): Name of the other party.
        peer_fingerprint (`str`): Fingerprint of the other party's public key. Read the fingerprint from the party's
            certificate, or obtain it over another channel that an attacker on the network cannot change.
        rotate_every (`int`, *optional*, defaults to `100`): Number of steps after which new RSA and AES keys are
            generated. [`ClientSession.end_step`] counts the steps. `None` means never. Both parties must use the same
            value.
        rsa_bits (`int`, *optional*, defaults to `3072`): Size in bits of the RSA keys that wrap secrets, from 2048 to
            8192.

    Raises:
        ImportError: If `cryptography` (extra `network`) is not installed.
        ValueError: If an argument is not allowed.
    """

    _is_server: ClassVar[bool]
    # The handshake or rotation in progress.
    _handshake: Any = None

    def __init__(
        self,
        identity: Identity,
        peer: str,
        peer_fingerprint: str,
        *,
        rotate_every: int | None = 100,
        rsa_bits: int = DEFAULT_RSA_BITS,
    ) -> None:
        require_cryptography(type(self).__name__)
        check_fingerprint(peer_fingerprint, peer)
        check_rsa_bits(rsa_bits)
        if rotate_every is not None and not 1 <= rotate_every < 2**32:
            raise ValueError(f"rotate_every={rotate_every} is not allowed. Set it to 1 step or more, or to None.")
        self._parties = Parties(identity, peer, peer_fingerprint, rotate_every)
        self._rsa_bits = rsa_bits
        self._keys: EpochKeys | None = None
        self._directions: tuple[DirectionCipher, DirectionCipher] | None = None
        self._steps = 0
        self._lock = threading.RLock()
        self._process = os.getpid()

    @property
    def epoch(self) -> int | None:
        """Number of the key epoch, from 0. `None` before the first handshake is complete."""
        return None if self._keys is None else self._keys.epoch

    @property
    def steps(self) -> int:
        """Number of completed steps in this epoch that this party knows. 0 if `rotate_every` is `None`."""
        return self._steps

    @property
    def rotation_due(self) -> bool:
        """Whether `rotate_every` steps are complete, or a key encrypted half of its limit (512 GiB)."""
        half_used = self._directions is not None and any(direction.is_half_used for direction in self._directions)
        return half_used or self._step_limit_reached()

    def seal(self, payload: Buffer, kind: str = "data") -> bytes:
        """
        Encrypt a payload as the next message to the peer.

        Args:
            payload (`bytes` or another buffer): The payload, of at most 2 GiB − 1 bytes.
            kind (`str`, *optional*, defaults to `"data"`): Kind of the message, such as the name of a remote
                procedure. The peer must open the message with the same kind.

        Returns:
            `bytes`: The encrypted message. It has 28 bytes more than the payload.

        Raises:
            RotationDueError: If the keys reached their limit. A client also raises it after `rotate_every` steps.
            EncryptionError: If the session has no keys yet, the keys are being rotated, the payload is too large, or
                this process is a fork of the process that created the session.
        """
        with self._lock:
            outgoing, _ = self._ready_directions()
            if self._handshake is not None:
                raise EncryptionError(
                    "The keys are being rotated. Complete the rotation before the next message, or create a new"
                    " session."
                )
            if not self._is_server and self._step_limit_reached():
                raise self._rotation_due_error("Call hello() to begin the rotation.")
            outgoing.check_capacity(memoryview(payload).nbytes)
            return outgoing.seal(payload, self._steps, _PAYLOAD + kind.encode())

    def open(self, sealed: Buffer, kind: str = "data") -> bytes:
        """
        Decrypt the next message of the peer.

        Args:
            sealed (`bytes` or another buffer): The encrypted message, as the peer's `seal` returned it.
            kind (`str`, *optional*, defaults to `"data"`): The expected kind of the message.

        Returns:
            `bytes`: The payload.

        Raises:
            RepeatedMessageError: If the message is the most recently opened message.
            MessageError: If the message is not the peer's next message of this kind. The error names the probable
                reason.
            RotationDueError: On a server, if the client sends a message after `rotate_every` steps without rotating
                the keys.
            EncryptionError: If the session has no keys yet, or this process is a fork of the process that created the
                session.
        """
        with self._lock:
            return self._decrypt(sealed, _PAYLOAD + kind.encode(), repr(kind))

    def _decrypt(self, sealed: Buffer, kind: bytes, kind_label: str) -> bytes:
        _, incoming = self._ready_directions()
        payload, steps = incoming.decrypt(sealed, kind, kind_label)
        if self._is_server:
            self._update_steps(steps, kind)
        incoming.accept(sealed)
        return payload

    def _update_steps(self, steps: int, kind: bytes) -> None:
        """On the server, check and store the client's number of steps, which an authentic message contained."""
        rotate_every = self._parties.rotate_every
        if rotate_every is None or kind.startswith(_ROTATION):
            return
        if steps < self._steps:
            raise MessageError(
                f"A message of {self._parties.peer!r} reports {steps} steps, but an earlier message reported"
                f" {self._steps} steps."
            )
        if steps >= rotate_every:
            raise self._rotation_due_error(f"{self._parties.peer!r} must rotate the keys.")
        self._steps = steps

    def _step_limit_reached(self) -> bool:
        return self._parties.rotate_every is not None and self._steps >= self._parties.rotate_every

    def _rotation_due_error(self, advice: str) -> RotationDueError:
        return RotationDueError(
            f"The keys of epoch {self.epoch} are valid for {self._parties.rotate_every} steps (rotate_every), which"
            f" are complete. {advice}"
        )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EncryptionError(
                "This process is a fork of the process that created the session, and would repeat nonces. Create a"
                " new session."
            )

    def _ready_directions(self) -> tuple[DirectionCipher, DirectionCipher]:
        """Return the ciphers of the outgoing and the incoming direction, or raise `EncryptionError`."""
        self._check_process()
        if self._directions is None:
            raise EncryptionError(
                f"The session with {self._parties.peer!r} has no keys yet. Complete the handshake first."
            )
        return self._directions

    def _seal_handshake(self, message: bytes, kind: bytes) -> bytes:
        """Encrypt a message of a rotation. The messages of the first handshake are not encrypted."""
        if self._keys is None:
            return message
        return self._ready_directions()[0].seal(message, self._steps, _ROTATION + kind)

    def _open_handshake(self, message: bytes, kind: bytes) -> bytes:
        """Decrypt a message that the peer's `_seal_handshake` returned."""
        if self._keys is None:
            return message
        return self._decrypt(message, _ROTATION + kind, f"rotation {kind.decode()!r}")

    def _begin_epoch(self, keys: EpochKeys) -> None:
        self._keys = keys
        outgoing = DirectionCipher(keys, self._is_server, self._parties.identity.name)
        self._directions = (outgoing, DirectionCipher(keys, not self._is_server, self._parties.peer))
        self._steps = 0
        self._handshake = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"A {type(self).__name__} cannot be copied or stored, because two copies would repeat nonces.")

    def __repr__(self) -> str:
        directions = self._directions
        outgoing, incoming = (0, 0) if directions is None else (cipher.num_messages for cipher in directions)
        return (
            f"{type(self).__name__}({self._parties.identity.name!r} with {self._parties.peer!r}, epoch={self.epoch},"
            f" steps={self._steps}, sealed={outgoing}, opened={incoming})"
        )
