"""Encryption between a client and the server of a split model (FL-GLM, section 3.2), with keys that change.

RSA carries at most 190 bytes under a key of 2048 bits, so it wraps secrets (`handshake.py`), from which AES-256-GCM
keys come, one for each direction and key epoch. A [`ClientSession`] and a [`ServerSession`] seal and open bytes with
them (`sealing.py`); a sealed message is 28 bytes longer than its payload. Each direction is opened strictly in order:
what is replayed, reordered, reflected, changed, of another session, epoch or kind, or follows on a lost message is
refused, and a refused message changes nothing, so that the right one still opens.

**Lost messages.** Whoever got no answer may send *the same sealed bytes* again, in the same session; sealing the
payload again would make it the next message. A peer that had opened them already raises [`RepeatedMessageError`], and
its transport then sends the same sealed answer again, and does not do the work twice. If the session itself is lost (a
process ended, a handshake or rotation broke off), both sides make new sessions, and payloads are sealed anew; old
messages are then refused, and whether a step was done before is for its number to say, which is the payload's affair.
A session is never stored, copied or used in a forked process: two copies would repeat nonces.

**Threat model.** Assumed: the fingerprints given are right, random numbers are random, and both ends keep their
private keys.
- A relay that reads, drops, delays, reorders, changes and invents messages learns who speaks (names, fingerprints,
  public keys and `rotate_every` stand in the first handshake), when, in which direction, the number of each message,
  step and key epoch, and each payload's exact size, from which batch and sequence lengths follow. It can stop a
  session, but not change what is opened.
- Another client is such a relay, whatever certificates it has; it cannot pose as this one.
- The server opens everything: encryption hides nothing from it, and activations and gradients can tell it of the text.
- Not claimed: secrecy within an epoch once memory was read in it (what was recorded of earlier epochs stays closed, as
  far as Python forgets keys: it does not overwrite them); anything from the day a party's signing key is stolen,
  except for what was sealed before; hidden sizes, times or names; resistance to quantum computers; that messages
  arrive.

TLS 1.3 and Noise order messages and separate directions in the same way, and HPKE wraps a key for its receiver. TLS
with certificates on both sides (`certificates.py`) belongs around this: it hides the handshake, and decides who may
ask for one. What this adds is that a party at which TLS ends on the way reads nothing, and that keys change when
FL-GLM has them change.
"""

from __future__ import annotations

import os
import threading
from typing import ClassVar, NoReturn

from hf_federated.security.handshake import (
    ClientExchange,
    EpochKeys,
    HandshakeError,
    Parties,
    Place,
    ServerExchange,
)
from hf_federated.security.keys import (
    DEFAULT_RSA_BITS,
    EncryptionError,
    Identity,
    check_fingerprint,
    check_rsa_bits,
    fingerprint,
    require_cryptography,
)
from hf_federated.security.sealing import Buffer, Direction, MessageError, RepeatedMessageError, RotationDueError


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

# First byte of the kind under the tag: no message of the caller's is one of a rotation.
_ROTATION = b"\0"
_PAYLOAD = b"\1"


class Session:
    """
    What [`ClientSession`] and [`ServerSession`] have in common: sealing and opening. Methods may be called from
    several threads; the order in which messages are sealed is the one in which they have to arrive.

    Args:
        identity ([`~split.keys.Identity`]): This party's name and signing key.
        peer (`str`): The other party's name.
        peer_fingerprint (`str`): The fingerprint of the other party's public key, learnt from its certificate or in
            another way that nobody on the wire can change.
        rotate_every (`int`, *optional*, defaults to `100`): Steps, as counted by [`ClientSession.end_step`], after
            which RSA and AES keys are made anew; `None` for never. The same on both sides.
        rsa_bits (`int`, *optional*, defaults to `3072`): Size of the RSA keys that wrap secrets, from 2048 to 8192.

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
            raise ValueError(f"rotate_every is {rotate_every}; allowed are 1 step or more, or None for never.")
        self._parties = Parties(identity, peer, peer_fingerprint, rotate_every)
        self._rsa_bits = rsa_bits
        self._keys: EpochKeys | None = None
        self._directions: tuple[Direction, Direction] | None = None
        self._steps = 0
        self._rotating = False
        self._lock = threading.RLock()
        self._process = os.getpid()

    @property
    def epoch(self) -> int | None:
        """The number of the key epoch, from 0; `None` before the first handshake is done."""
        return None if self._keys is None else self._keys.epoch

    @property
    def steps(self) -> int:
        """Steps that ended in this epoch, as far as this party knows; 0 if `rotate_every` is `None`."""
        return self._steps

    @property
    def rotation_due(self) -> bool:
        """Whether `rotate_every` steps ended, or a key carried half of what it may (512 GiB)."""
        used = self._directions is not None and any(direction.half_used for direction in self._directions)
        return used or self._steps_are_up()

    def seal(self, payload: Buffer, kind: str = "data") -> bytes:
        """
        Encrypts a payload as the next message to the peer.

        Args:
            payload (`bytes` or another buffer): At most 2 GiB − 1 bytes.
            kind (`str`, *optional*, defaults to `"data"`): What the message is, such as the name of a remote
                procedure. The peer opens it only under the same.

        Returns:
            `bytes`: 28 bytes more than the payload.

        Raises:
            RotationDueError: If the keys carried what they may; for a client also after `rotate_every` steps.
            EncryptionError: If there are no keys yet, they are being rotated, the payload is too large, or this
                process is a fork of the session's.
        """
        size = memoryview(payload).nbytes
        with self._lock:
            outgoing, _ = self._open_directions()
            if self._rotating:
                raise EncryptionError("The keys are being rotated: end the rotation, or make a new session.")
            if not self._is_server and self._steps_are_up():
                raise self._rotation_due_error("hello() begins the rotation.")
            outgoing.check_room(size)
            return outgoing.seal(payload, self._steps, _PAYLOAD + kind.encode())

    def open(self, sealed: Buffer, kind: str = "data") -> bytes:
        """
        Decrypts the next message of the peer.

        Args:
            sealed (`bytes` or another buffer): What the peer's `seal` returned.
            kind (`str`, *optional*, defaults to `"data"`): What the message has to be.

        Returns:
            `bytes`: The payload.

        Raises:
            RepeatedMessageError: If it is the message opened last.
            MessageError: If it is not the peer's next message of this kind; says what it seems to be.
            RotationDueError: On a server, if the client goes on after `rotate_every` steps.
            EncryptionError: If there are no keys yet, or this process is a fork of the session's.
        """
        with self._lock:
            return self._decrypt(sealed, _PAYLOAD + kind.encode(), repr(kind))

    def _decrypt(self, sealed: Buffer, kind: bytes, kind_in_words: str) -> bytes:
        _, incoming = self._open_directions()
        payload, steps = incoming.decrypt(sealed, kind, kind_in_words)
        if self._is_server:
            self._take_steps(steps, kind)
        incoming.accept(sealed)
        return payload

    def _take_steps(self, steps: int, kind: bytes) -> None:
        """On the server: the client's count of steps, which an authentic message brought."""
        due = self._parties.rotate_every
        if due is None or kind.startswith(_ROTATION):
            return
        if steps < self._steps:
            raise MessageError(f"A message of {self._parties.peer!r} counts {steps} steps after {self._steps}.")
        if steps >= due:
            raise self._rotation_due_error(f"{self._parties.peer!r} has to rotate them.")
        self._steps = steps

    def _steps_are_up(self) -> bool:
        return self._parties.rotate_every is not None and self._steps >= self._parties.rotate_every

    def _rotation_due_error(self, advice: str) -> RotationDueError:
        return RotationDueError(
            f"The keys of epoch {self.epoch} are good for {self._parties.rotate_every} steps (rotate_every), which"
            f" ended. {advice}"
        )

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EncryptionError(
                "This process is a fork of the session's and would repeat nonces. Make a new session."
            )

    def _open_directions(self) -> tuple[Direction, Direction]:
        """The outgoing and the incoming direction."""
        self._check_process()
        if self._directions is None:
            raise EncryptionError(f"There are no keys with {self._parties.peer!r} yet: the handshake comes first.")
        return self._directions

    def _seal_rotation(self, message: bytes, kind: bytes) -> bytes:
        return self._open_directions()[0].seal(message, self._steps, _ROTATION + kind)

    def _open_rotation(self, sealed: bytes, kind: bytes) -> bytes:
        return self._decrypt(sealed, _ROTATION + kind, f"rotation {kind.decode()!r}")

    def _begin_epoch(self, keys: EpochKeys) -> None:
        self._keys = keys
        outgoing = Direction(keys, self._is_server, self._parties.own.name)
        self._directions = (outgoing, Direction(keys, not self._is_server, self._parties.peer))
        self._steps = 0
        self._rotating = False

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"A {type(self).__name__} cannot be copied or stored: two of them would repeat nonces.")

    def __repr__(self) -> str:
        outgoing, incoming = (0, 0) if self._directions is None else (one.number for one in self._directions)
        return (
            f"{type(self).__name__}({self._parties.own.name!r} with {self._parties.peer!r}, epoch={self.epoch},"
            f" steps={self._steps}, sealed={outgoing}, opened={incoming})"
        )


class ClientSession(Session):
    """
    A client's end. It begins the handshake, and each rotation, which is the same handshake under the keys of the epoch
    that it ends: [`~ClientSession.hello`], the server's `reply`, [`~ClientSession.finish`], the server's `complete`.

    Arguments and errors are those of [`Session`].

    Example:

    ```python
    >>> from hf_federated.security.encryption import ClientSession, Identity, ServerSession

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
    _exchange: ClientExchange | None = None

    def hello(self) -> bytes:
        """
        Begins the handshake or, in a session with keys, their rotation; nothing else is sealed until it ends. Makes an
        RSA key, which takes a tenth of a second to one second.

        Returns:
            `bytes`: For [`ServerSession.reply`].
        """
        with self._lock:
            self._check_process()
            exchange = ClientExchange(self._parties, Place.after(self._keys), self._rsa_bits)
            message = exchange.hello if self._keys is None else self._seal_rotation(exchange.hello, b"hello")
            self._exchange, self._rotating = exchange, self._keys is not None
            return message

    def finish(self, reply: bytes) -> bytes:
        """
        Ends the handshake or rotation on this side: what is sealed from now on is under the new keys.

        Args:
            reply (`bytes`): What [`ServerSession.reply`] returned.

        Returns:
            `bytes`: For [`ServerSession.complete`], before anything that is sealed after it.

        Raises:
            HandshakeError: If the reply is not the pinned server's to this hello.
            MessageError: If a rotation's reply is not the server's next message.
        """
        with self._lock:
            self._check_process()
            if self._exchange is None:
                raise HandshakeError("No handshake is under way: hello() begins one.")
            inner = reply if self._keys is None else self._open_rotation(reply, b"reply")
            finish, keys = self._exchange.finish(inner)
            message = finish if self._keys is None else self._seal_rotation(finish, b"finish")
            self._exchange = None
            self._begin_epoch(keys)
            return message

    def end_step(self) -> None:
        """
        Counts a step (or a round, or whatever `rotate_every` is to count). The server learns of it from the next
        message, and refuses one after `rotate_every` of them.

        Raises:
            RotationDueError: If `rotate_every` steps ended before.
        """
        with self._lock:
            self._open_directions()
            if self._parties.rotate_every is None:
                return
            if self._steps_are_up():
                raise self._rotation_due_error("hello() begins the rotation.")
            self._steps += 1


class ServerSession(Session):
    """
    The server's end of one client's session: it answers. Arguments and errors are those of [`Session`]; an example
    stands at [`ClientSession`].

    A client that connects anew gets a new `ServerSession`. Keep the old one until the new one is complete: a hello
    that somebody recorded is answered like any other, but never completed.

    Example:

    ```python
    >>> from hf_federated.security.encryption import Identity, ServerSession

    >>> north, center = Identity.generate("north", 2048), Identity.generate("center", 2048)
    >>> ServerSession(center, "north", north.fingerprint)
    ServerSession('center' with 'north', epoch=None, steps=0, sealed=0, opened=0)

    ```
    """

    _is_server = True
    _exchange: ServerExchange | None = None

    def reply(self, hello: bytes) -> bytes:
        """
        Answers a client's hello: the first in a session, or one that rotates the keys; nothing else is sealed until
        the rotation is complete. Makes an RSA key, as `hello` does, so let TLS decide who may ask.

        Args:
            hello (`bytes`): What [`ClientSession.hello`] returned.

        Returns:
            `bytes`: For [`ClientSession.finish`].

        Raises:
            HandshakeError: If the hello is not the pinned client's, or of other settings.
            MessageError: If a rotation's hello is not the client's next message.
        """
        with self._lock:
            self._check_process()
            inner = hello if self._keys is None else self._open_rotation(hello, b"hello")
            exchange = ServerExchange(self._parties, Place.after(self._keys), self._rsa_bits, inner)
            message = exchange.reply if self._keys is None else self._seal_rotation(exchange.reply, b"reply")
            self._exchange, self._rotating = exchange, self._keys is not None
            return message

    def complete(self, finish: bytes) -> None:
        """
        Ends the handshake or rotation on this side: the new keys are in use.

        Args:
            finish (`bytes`): What [`ClientSession.finish`] returned.

        Raises:
            HandshakeError: If it does not end the handshake that is under way.
            MessageError: If a rotation's finish is not the client's next message.
        """
        with self._lock:
            self._check_process()
            if self._exchange is None:
                raise HandshakeError(f"No handshake with {self._parties.peer!r} is under way: its hello comes first.")
            inner = finish if self._keys is None else self._open_rotation(finish, b"finish")
            keys = self._exchange.complete(inner)
            self._exchange = None
            self._begin_epoch(keys)
