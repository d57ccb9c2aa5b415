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

from .authenticated_encryption import MessageError, RepeatedMessageError, RotationDueError
from .handshake import ClientHandshake, HandshakeContext, HandshakeError, ServerHandshake
from .keys import EncryptionError, Identity, fingerprint
from .session import Session


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
            message = self._seal_handshake(handshake.hello, b"hello")
            self._handshake = handshake
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
            finish, keys = self._handshake.finish(self._open_handshake(reply, b"reply"))
            message = self._seal_handshake(finish, b"finish")
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
            inner = self._open_handshake(hello, b"hello")
            handshake = ServerHandshake(self._parties, HandshakeContext.after(self._keys), self._rsa_bits, inner)
            message = self._seal_handshake(handshake.reply, b"reply")
            self._handshake = handshake
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
            keys = self._handshake.complete(self._open_handshake(finish, b"finish"))
            self._begin_epoch(keys)
