"""
Encrypted sessions between a client and the server of a split model (FL-GLM, section 3.2), with key rotation.

RSA encrypts at most 190 bytes with a key of 2048 bits, so it only wraps secrets (`handshake.py`). The AES-256-GCM keys
are derived from these secrets, one key for each direction and key epoch. A [`ClientSession`] and a [`ServerSession`]
encrypt and decrypt messages with these keys (`authenticated_encryption.py`). An encrypted message is 28 bytes longer
than its payload. Messages of one direction must be opened strictly in order. A session rejects a message that is
replayed, reordered, reflected, changed, sent after a lost message, or that belongs to another session, epoch or kind.
A rejected message does not change the session, so the session still accepts the correct message.

**Lost messages.** A party that receives no answer may send *the same encrypted bytes* again in the same session.
Encrypting the payload again would create the next message. If the peer already opened the message, the peer raises
[`RepeatedMessageError`]. The peer's transport then sends the same encrypted answer again.
If the session itself is lost, because a process ended or a handshake or rotation was interrupted, both parties create
new sessions and encrypt their payloads again. The new sessions reject old messages. The session does not know whether
a step was done before; the payload must contain its step number. A session is never stored, copied or used in a forked
process, because two copies would repeat nonces.

**Threat model.** Assumptions: the pinned fingerprints are correct, random numbers are unpredictable, and both parties
keep their private keys secret.

- A relay on the network can read, drop, delay, reorder, change and create messages. It learns the parties (the first
  handshake contains names, fingerprints, public keys and `rotate_every`), the time and direction of each message, the
  numbers of message, step and key epoch, and the exact size of each payload. The size reveals batch and sequence
  lengths. The relay can interrupt a session, but cannot change the payload that a party opens.
- Another client has the abilities of such a relay, independent of its certificates. It cannot impersonate this client.
- The server decrypts all messages. Encryption hides nothing from the server, and activations and gradients can reveal
  the text to it.
- The session does not guarantee secrecy within an epoch after an attacker reads the memory of a party in this epoch.
  Recorded messages of earlier epochs stay secret as far as Python releases keys; Python does not overwrite them.
- After the signing key of a party is stolen, the session guarantees only the secrecy of earlier messages.
- The session does not hide sizes, times or names, does not resist quantum computers, and does not guarantee delivery.

TLS 1.3 and the Noise protocol framework order messages and separate directions in the same way, and HPKE wraps a key
for its receiver. Use the session inside mutual TLS (`certificates.py`): TLS hides the handshake and decides which
clients may request a handshake. In addition to TLS, the session hides the payloads from a proxy that terminates TLS,
and rotates the keys at the intervals that FL-GLM defines.
"""

from __future__ import annotations

import os
import threading
from typing import ClassVar, NoReturn

from .authenticated_encryption import (
    Buffer,
    DirectionCipher,
    MessageError,
    RepeatedMessageError,
    RotationDueError,
)
from .handshake import (
    ClientHandshake,
    EpochKeys,
    HandshakeContext,
    HandshakeError,
    Parties,
    ServerHandshake,
)
from .keys import (
    DEFAULT_RSA_BITS,
    EncryptionError,
    Identity,
    check_fingerprint,
    check_rsa_bits,
    fingerprint,
    require_cryptography,
)


__all__ = [
    "ClientSession",
    "EncryptionError",
    "HandshakeError",
    "Identity",
    "MessageError",
    "RepeatedMessageError",
    "RotationDueError",
    "ServerSession",
    "Session",
    "fingerprint",
]

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
        ImportError: If `cryptography` (extra `split`) is not installed.
        ValueError: If an argument is not allowed.
    """

    _is_server: ClassVar[bool]

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
        self._rotating = False
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
        size = memoryview(payload).nbytes
        with self._lock:
            outgoing, _ = self._ready_directions()
            if self._rotating:
                raise EncryptionError(
                    "The keys are being rotated. Complete the rotation before the next message, or create a new"
                    " session."
                )
            if not self._is_server and self._step_limit_reached():
                raise self._rotation_due_error("Call hello() to begin the rotation.")
            outgoing.check_capacity(size)
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

    def _seal_rotation(self, message: bytes, kind: bytes) -> bytes:
        return self._ready_directions()[0].seal(message, self._steps, _ROTATION + kind)

    def _open_rotation(self, sealed: bytes, kind: bytes) -> bytes:
        return self._decrypt(sealed, _ROTATION + kind, f"rotation {kind.decode()!r}")

    def _begin_epoch(self, keys: EpochKeys) -> None:
        self._keys = keys
        outgoing = DirectionCipher(keys, self._is_server, self._parties.identity.name)
        self._directions = (outgoing, DirectionCipher(keys, not self._is_server, self._parties.peer))
        self._steps = 0
        self._rotating = False

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"A {type(self).__name__} cannot be copied or stored, because two copies would repeat nonces.")

    def __repr__(self) -> str:
        directions = self._directions
        outgoing, incoming = (0, 0) if directions is None else (cipher.num_messages for cipher in directions)
        return (
            f"{type(self).__name__}({self._parties.identity.name!r} with {self._parties.peer!r}, epoch={self.epoch},"
            f" steps={self._steps}, sealed={outgoing}, opened={incoming})"
        )


class ClientSession(Session):
    """
    The client's side of a session.

    The client begins the handshake and each rotation. A rotation is the same handshake, encrypted with the keys of the
    epoch that it ends. The four calls are [`~ClientSession.hello`], the server's `reply`, [`~ClientSession.finish`]
    and the server's `complete`.

    For arguments and errors, see [`Session`].

    Example:

    ```python
    >>> from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession

    >>> north, center = Identity.generate("north", 2048), Identity.generate("center", 2048)
    >>> client = ClientSession(north, "center", center.fingerprint, rotate_every=1, rsa_bits=2048)
    >>> server = ServerSession(center, "north", north.fingerprint, rotate_every=1, rsa_bits=2048)
    >>> server.complete(client.finish(server.reply(client.hello())))
    >>> sealed = client.seal(b"hidden states", kind="forward")
    >>> len(sealed), server.open(sealed, kind="forward")
    (41, b'hidden states')
    >>> client.end_step()
    >>> if client.rotation_due:  # the same four calls
    ...     server.complete(client.finish(server.reply(client.hello())))
    >>> client
    ClientSession('north' with 'center', epoch=1, steps=0, sealed=0, opened=0)

    ```
    """

    _is_server = False
    _handshake: ClientHandshake | None = None

    def hello(self) -> bytes:
        """
        Begin the handshake or, if the session has keys, a rotation of the keys.

        No payloads can be encrypted until a rotation is complete. The method generates an RSA key, which takes a tenth
        of a second to one second.

        Returns:
            `bytes`: The message for [`ServerSession.reply`].
        """
        with self._lock:
            self._check_process()
            handshake = ClientHandshake(self._parties, HandshakeContext.after(self._keys), self._rsa_bits)
            message = handshake.hello if self._keys is None else self._seal_rotation(handshake.hello, b"hello")
            self._handshake, self._rotating = handshake, self._keys is not None
            return message

    def finish(self, reply: bytes) -> bytes:
        """
        Complete the handshake or rotation on the client. Later messages are encrypted with the new keys.

        Args:
            reply (`bytes`): The return value of [`ServerSession.reply`].

        Returns:
            `bytes`: The message for [`ServerSession.complete`]. The server must receive it before later messages.

        Raises:
            HandshakeError: If no handshake was begun, or the message is not the pinned server's reply to this hello.
            MessageError: If the reply of a rotation is not the server's next message.
        """
        with self._lock:
            self._check_process()
            if self._handshake is None:
                raise HandshakeError("No handshake is in progress. Call hello() to begin a handshake.")
            inner = reply if self._keys is None else self._open_rotation(reply, b"reply")
            finish, keys = self._handshake.finish(inner)
            message = finish if self._keys is None else self._seal_rotation(finish, b"finish")
            self._handshake = None
            self._begin_epoch(keys)
            return message

    def end_step(self) -> None:
        """
        Count a step (or a round, or another unit of `rotate_every`).

        The next message reports the number of steps to the server. The server rejects messages after `rotate_every`
        steps.

        Raises:
            RotationDueError: If `rotate_every` steps were already counted in this epoch.
        """
        with self._lock:
            self._ready_directions()
            if self._parties.rotate_every is None:
                return
            if self._step_limit_reached():
                raise self._rotation_due_error("Call hello() to begin the rotation.")
            self._steps += 1


class ServerSession(Session):
    """
    The server's side of a session with one client. The server answers the client's handshakes.

    For arguments and errors, see [`Session`]. [`ClientSession`] has an example of a complete session.

    A client that connects again needs a new `ServerSession`. Keep the old session until the new session is complete:
    the server also replies to a hello that an attacker recorded, but the attacker cannot complete the handshake.

    Example:

    ```python
    >>> from hf_federated.security.encrypted_session import Identity, ServerSession

    >>> north, center = Identity.generate("north", 2048), Identity.generate("center", 2048)
    >>> ServerSession(center, "north", north.fingerprint)
    ServerSession('center' with 'north', epoch=None, steps=0, sealed=0, opened=0)

    ```
    """

    _is_server = True
    _handshake: ServerHandshake | None = None

    def reply(self, hello: bytes) -> bytes:
        """
        Answer the hello of a client, which begins a session or rotates its keys.

        No payloads can be encrypted until a rotation is complete. The method generates an RSA key, which takes as long
        as in `hello`. Use mutual TLS to restrict the clients that can request a handshake.

        Args:
            hello (`bytes`): The return value of [`ClientSession.hello`].

        Returns:
            `bytes`: The message for [`ClientSession.finish`].

        Raises:
            HandshakeError: If the message is not a hello of the pinned client, or the settings of the parties differ.
            MessageError: If the hello of a rotation is not the client's next message.
        """
        with self._lock:
            self._check_process()
            inner = hello if self._keys is None else self._open_rotation(hello, b"hello")
            handshake = ServerHandshake(self._parties, HandshakeContext.after(self._keys), self._rsa_bits, inner)
            message = handshake.reply if self._keys is None else self._seal_rotation(handshake.reply, b"reply")
            self._handshake, self._rotating = handshake, self._keys is not None
            return message

    def complete(self, finish: bytes) -> None:
        """
        Complete the handshake or rotation on the server. The session uses the new keys afterwards.

        Args:
            finish (`bytes`): The return value of [`ClientSession.finish`].

        Raises:
            HandshakeError: If no handshake is in progress, or the message is not the finish of this handshake.
            MessageError: If the finish of a rotation is not the client's next message.
        """
        with self._lock:
            self._check_process()
            if self._handshake is None:
                raise HandshakeError(
                    f"No handshake with {self._parties.peer!r} is in progress. Pass its hello to reply() first."
                )
            inner = finish if self._keys is None else self._open_rotation(finish, b"finish")
            keys = self._handshake.complete(inner)
            self._handshake = None
            self._begin_epoch(keys)
