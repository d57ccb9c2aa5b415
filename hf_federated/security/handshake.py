"""
The handshake between a client and the server of a split model: a key agreement in three signed messages.

Each key epoch begins with the same handshake:

1. hello, client → server: a new RSA public key of the client.
2. reply, server → client: a new RSA public key of the server, and the server's secret, encrypted for the client's key.
3. finish, client → server: the client's secret, encrypted for the server's key.

Each message contains the names and fingerprints of both parties, the session, the epoch and `rotate_every`. The sender
signs each message with its [`Identity`], whose fingerprint the receiver knows beforehand. The signature is necessary
because RSA-OAEP does not authenticate the sender of a secret. Reply and finish contain the hash of all previous
messages, so a message is not valid in another handshake. The keys are HKDF-SHA256 of both secrets. The info parameter
contains the hash of all three messages, and the salt is the chaining key of the previous epoch.

The form of the signatures and the transcript hash follow TLS 1.3 (RFC 8446). The contribution of both sides and the
chaining of the epochs through the salt follow the Noise protocol framework. RSA instead of Diffie–Hellman is the
choice of FL-GLM ("we generate RSA public and private keys at the beginning of FL and then pass the public keys between
server and client"). The messages are packed trees (`hf_federated.messages.serialization`) and are never unpickled.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..messages.serialization import pack, unpack
from .keys import (
    EncryptionError,
    Identity,
    encode_public_key,
    fingerprint_of,
    generate_rsa_key,
    is_signed,
    load_public_key,
    unwrap,
    wrap,
)


if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey


VERSION = 1

# Larger messages are not parsed. A handshake message with keys of 8192 bits has 12 kB.
MAX_MESSAGE_BYTES = 1 << 16

SECRET_BYTES = 32

_KEY_INFO = b"hf-federated split keys 1"


class HandshakeError(EncryptionError):
    """Raised when a handshake message is rejected. The error names the sender and the reason."""


@dataclass(frozen=True)
class Parties:
    """
    The two parties of a session from the view of one party, and the setting that both must share.

    Attributes:
        identity ([`~hf_federated.security.keys.Identity`]): This party's name and signing key.
        peer (`str`): Name of the other party.
        peer_fingerprint (`str`): Pinned fingerprint of the other party's signing key.
        rotate_every (`int`, *optional*): Number of steps in a key epoch. `None` means no limit.
    """

    identity: Identity
    peer: str
    peer_fingerprint: str
    rotate_every: int | None


@dataclass(frozen=True)
class EpochKeys:
    """
    The secrets of one key epoch.

    Attributes:
        session_id (`bytes`): Transcript hash of the first handshake of the session.
        epoch (`int`): Number of the key epoch, from 0.
        client_to_server (`bytes`): AES-256 key for messages from the client to the server.
        server_to_client (`bytes`): AES-256 key for messages from the server to the client.
        chaining_key (`bytes`): Salt for the keys of the next epoch.
    """

    session_id: bytes
    epoch: int
    client_to_server: bytes = field(repr=False)
    server_to_client: bytes = field(repr=False)
    chaining_key: bytes = field(repr=False)


@dataclass(frozen=True)
class HandshakeContext:
    """
    The position of a handshake in a session: the first handshake, or a rotation of the keys of an epoch.

    Attributes:
        session_id (`bytes`): Id of the session. Empty in the first handshake.
        epoch (`int`): Number of the key epoch that the handshake begins.
        chaining_key (`bytes`, *optional*): Chaining key of the previous epoch. `None` in the first handshake.
    """

    session_id: bytes = b""
    epoch: int = 0
    chaining_key: bytes | None = field(default=None, repr=False)

    @classmethod
    def after(cls, keys: EpochKeys | None) -> HandshakeContext:
        """Return the context of the handshake that replaces `keys`, or of the first handshake if `keys` is `None`."""
        return cls() if keys is None else cls(keys.session_id, keys.epoch + 1, keys.chaining_key)

    @property
    def message_fields(self) -> dict[str, Any]:
        """The fields that every message of the handshake contains."""
        return {"session": self.session_id.hex(), "epoch": self.epoch}


def _common(kind: str, sender: tuple[str, str], receiver: tuple[str, str], parties: Parties) -> dict[str, Any]:
    """Return the fields that every message contains and that the receiver compares with its own values."""
    return {
        "message": kind,
        "version": VERSION,
        "rotate_every": parties.rotate_every,
        "sender": sender[0],
        "sender_fingerprint": sender[1],
        "receiver": receiver[0],
        "receiver_fingerprint": receiver[1],
    }


def _pack_signed(public_key: bytes, body: bytes, signature: bytes) -> bytes:
    return pack({"public_key": public_key.hex(), "body": body.hex(), "signature": signature.hex()})


def _sign_message(parties: Parties, kind: str, context: dict[str, Any], **content: str) -> tuple[bytes, bytes]:
    """Build a signed message. Return the message and its signed part."""
    identity = parties.identity
    common = _common(kind, (identity.name, identity.fingerprint), (parties.peer, parties.peer_fingerprint), parties)
    body = pack({**common, **context, **content})
    return _pack_signed(identity.public_key, body, identity.sign(body)), body


def _verify_message(
    parties: Parties, kind: str, context: dict[str, Any], message: bytes, *content: str
) -> tuple[dict[str, bytes], bytes]:
    """
    Verify a message: first the pinned fingerprint, then the signature, then the fields.

    Returns:
        `tuple[dict[str, bytes], bytes]`: The fields with the names in `content`, and the signed bytes.

    Raises:
        HandshakeError: If a check fails.
    """
    identity, peer = parties.identity, parties.peer
    body = _verified_body(parties, kind, message)
    try:
        fields = unpack(body)
    except ValueError as error:
        raise HandshakeError(f"The {kind} of {peer!r} is signed, but is not a packed tree: {error}") from None
    receiver = (identity.name, identity.fingerprint)
    expected = _common(kind, (peer, parties.peer_fingerprint), receiver, parties) | context
    if not isinstance(fields, dict) or set(fields) != {*expected, *content}:
        raise HandshakeError(f"The {kind} of {peer!r} has other fields than {', '.join([*expected, *content])}.")
    for name, value in expected.items():
        # Compare the type too: 1 == True, and the comparison of a tensor has no truth value.
        if type(fields[name]) is not type(value) or fields[name] != value:
            advice = (
                " Give both parties the same rotate_every." if name == "rotate_every" else " Begin a new handshake."
            )
            raise HandshakeError(
                f"The {kind} of {peer!r} has {name} = {fields[name]!r}, but {identity.name!r} expects"
                f" {value!r}.{advice}"
            )
    try:
        return {name: bytes.fromhex(fields[name]) for name in content}, body
    except (TypeError, ValueError):
        raise HandshakeError(f"The {kind} of {peer!r} has a field that is not hexadecimal.") from None


def _verified_body(parties: Parties, kind: str, message: bytes) -> bytes:
    """
    Return the signed part of a message of the pinned party.

    Raises:
        HandshakeError: If the message is malformed, or is not signed with the pinned key.
    """
    peer = parties.peer
    if len(message) > MAX_MESSAGE_BYTES:
        raise HandshakeError(
            f"The {kind} of {peer!r} has {len(message)} bytes, but at most {MAX_MESSAGE_BYTES} bytes are allowed."
        )
    try:
        outer = unpack(message)
        values = outer if isinstance(outer, dict) else {}
        public_key, body, signature = (bytes.fromhex(values[name]) for name in ("public_key", "body", "signature"))
    except (KeyError, TypeError, ValueError) as error:
        raise HandshakeError(f"The {kind} of {peer!r} is not a handshake message: {error}") from None
    fingerprint = fingerprint_of(public_key)
    if fingerprint != parties.peer_fingerprint:
        raise HandshakeError(
            f"The {kind} of {peer!r} is signed with the key {fingerprint}, but {parties.peer_fingerprint} is pinned"
            f" for {peer!r}. Verify the fingerprint with {peer!r} over another channel: either {peer!r} has a new key,"
            " or an attacker impersonates it."
        )
    # The signature covers only the body. The comparison enforces one encoding of everything outside the body.
    if _pack_signed(public_key, body, signature) != message or not is_signed(body, signature, public_key):
        raise HandshakeError(f"The signature of the {kind} of {peer!r} is not valid: the message was changed.")
    return body


def _transcript(*bodies: bytes) -> bytes:
    """Return the hash of the messages so far: the hash of the hashes of their signed parts, in order."""
    return hashlib.sha256(b"".join(hashlib.sha256(body).digest() for body in bodies)).digest()


def _peer_key(der: bytes, peer: str) -> bytes:
    try:
        load_public_key(der)
    except EncryptionError as error:
        raise HandshakeError(f"The encryption key of {peer!r} is rejected: {error}") from None
    return der


def _unwrap_secret(wrapped: bytes, key: RSAPrivateKey, peer: str) -> bytes:
    try:
        secret = unwrap(wrapped, key)
    except EncryptionError as error:
        raise HandshakeError(f"The secret of {peer!r} is rejected: {error}") from None
    if len(secret) != SECRET_BYTES:
        raise HandshakeError(f"The secret of {peer!r} has {len(secret)} bytes instead of {SECRET_BYTES}.")
    return secret


def derive_keys(context: HandshakeContext, client_secret: bytes, server_secret: bytes, transcript: bytes) -> EpochKeys:
    """
    Derive the keys of an epoch with HKDF-SHA256 (RFC 5869).

    Args:
        context ([`HandshakeContext`]): The position of the handshake in the session. Its chaining key is the salt.
        client_secret (`bytes`): The secret of the client.
        server_secret (`bytes`): The secret of the server.
        transcript (`bytes`): Hash of the three messages of the handshake.

    Returns:
        [`EpochKeys`]: A key for each direction, and the chaining key of the next epoch.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # In the first epoch the salt is `None`, which RFC 5869 defines as zeros.
    kdf = HKDF(hashes.SHA256(), length=96, salt=context.chaining_key, info=_KEY_INFO + transcript)
    material = kdf.derive(client_secret + server_secret)
    session_id = context.session_id or transcript
    return EpochKeys(session_id, context.epoch, material[:32], material[32:64], material[64:])


class ClientHandshake:
    """
    The client's side of one handshake. Send `hello`, then call [`~ClientHandshake.finish`] with the server's reply.

    Args:
        parties ([`Parties`]): The client and the server.
        context ([`HandshakeContext`]): The position of the handshake in the session.
        rsa_bits (`int`): Size of the client's encryption key in bits.
    """

    def __init__(self, parties: Parties, context: HandshakeContext, rsa_bits: int) -> None:
        self._parties = parties
        self._context = context
        self._key = generate_rsa_key(rsa_bits)
        self.hello, self._hello_body = _sign_message(
            parties, "hello", context.message_fields, encryption_key=encode_public_key(self._key.public_key()).hex()
        )

    def finish(self, reply: bytes) -> tuple[bytes, EpochKeys]:
        """
        Verify the reply. Return the finish message and the keys.

        Raises:
            HandshakeError: If the message is not the pinned server's reply to this hello. The handshake still accepts
                the correct reply.
        """
        parties, hello = self._parties, self._hello_body
        fields = {**self._context.message_fields, "transcript": _transcript(hello).hex()}
        content, reply_body = _verify_message(parties, "reply", fields, reply, "encryption_key", "wrapped_secret")
        server_secret = _unwrap_secret(content["wrapped_secret"], self._key, parties.peer)
        client_secret = os.urandom(SECRET_BYTES)
        wrapped = wrap(client_secret, _peer_key(content["encryption_key"], parties.peer)).hex()
        fields = {**self._context.message_fields, "transcript": _transcript(hello, reply_body).hex()}
        finish, body = _sign_message(parties, "finish", fields, wrapped_secret=wrapped)
        transcript = _transcript(hello, reply_body, body)
        return finish, derive_keys(self._context, client_secret, server_secret, transcript)


class ServerHandshake:
    """
    The server's side of one handshake. Send `reply`, then call [`~ServerHandshake.complete`] with the client's finish.

    Args:
        parties ([`Parties`]): The server and the client.
        context ([`HandshakeContext`]): The position of the handshake in the session.
        rsa_bits (`int`): Size of the server's encryption key in bits.
        hello (`bytes`): The client's first message.

    Attributes:
        context ([`HandshakeContext`]): The position of the handshake in the session.
        reply (`bytes`): The message for the client.

    Raises:
        HandshakeError: If the hello is not a hello of the pinned client.
    """

    def __init__(self, parties: Parties, context: HandshakeContext, rsa_bits: int, hello: bytes) -> None:
        self._parties = parties
        self.context = context
        content, hello_body = _verify_message(parties, "hello", context.message_fields, hello, "encryption_key")
        client_key = _peer_key(content["encryption_key"], parties.peer)
        self._key = generate_rsa_key(rsa_bits)
        self._secret = os.urandom(SECRET_BYTES)
        self.reply, reply_body = _sign_message(
            parties,
            "reply",
            {**context.message_fields, "transcript": _transcript(hello_body).hex()},
            encryption_key=encode_public_key(self._key.public_key()).hex(),
            wrapped_secret=wrap(self._secret, client_key).hex(),
        )
        self._bodies = (hello_body, reply_body)

    def complete(self, finish: bytes) -> EpochKeys:
        """
        Verify the finish message and return the keys.

        Raises:
            HandshakeError: If the message is not the finish of this handshake. The handshake still accepts the correct
                finish.
        """
        fields = {**self.context.message_fields, "transcript": _transcript(*self._bodies).hex()}
        content, body = _verify_message(self._parties, "finish", fields, finish, "wrapped_secret")
        client_secret = _unwrap_secret(content["wrapped_secret"], self._key, self._parties.peer)
        return derive_keys(self.context, client_secret, self._secret, _transcript(*self._bodies, body))
