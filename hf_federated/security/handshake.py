"""How a client and the server of a split model come to share keys: three signed messages, the same for each key epoch.

1. hello, client → server: a fresh RSA public key of the client.
2. reply, server → client: a fresh RSA public key of the server, and a secret of its, wrapped for the client's.
3. finish, client → server: a secret of the client's, wrapped for the server's.

Each message names both parties by name and fingerprint, the session, the epoch and the `rotate_every` they agree on,
and is signed with the sender's [`Identity`], whose fingerprint the receiver was given beforehand: RSA-OAEP alone says
nothing of who wrapped a secret. Reply and finish hold the hash of all that went before, so an old message fits no
other handshake. The keys are HKDF-SHA256 of both secrets, over the hash of all three messages, salted with what the
previous epoch left for the next.

The form of the signatures and the hash of everything that was said are TLS 1.3's (RFC 8446); that both sides
contribute and that the salt chains the epochs is Noise's. RSA in place of Diffie–Hellman is FL-GLM's choice ("we
generate RSA public and private keys at the beginning of FL and then pass the public keys between server and client").
The messages are packed trees (`hf_federated.messages.serialization`), which nothing unpickles.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_federated.messages.serialization import pack, unpack
from hf_federated.security.keys import (
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

# A handshake message under keys of 8192 bits has 12 kB. More is not read at all.
MAX_MESSAGE_BYTES = 1 << 16

SECRET_BYTES = 32

_KEY_INFO = b"hf-federated split keys 1"


class HandshakeError(EncryptionError):
    """A handshake message that was refused: the message says whose, and why."""


@dataclass(frozen=True)
class Parties:
    """Who speaks with whom, and what both have to agree on."""

    own: Identity
    peer: str
    peer_fingerprint: str
    rotate_every: int | None


@dataclass(frozen=True)
class EpochKeys:
    """The secrets of one key epoch: an AES-256 key for each direction and what the next epoch's keys start from."""

    session_id: bytes
    epoch: int
    client_to_server: bytes = field(repr=False)
    server_to_client: bytes = field(repr=False)
    chain: bytes = field(repr=False)


@dataclass(frozen=True)
class Place:
    """Where a handshake stands: the first of a session, or one that follows on an epoch's keys."""

    session_id: bytes = b""
    epoch: int = 0
    chain: bytes | None = field(default=None, repr=False)

    @classmethod
    def after(cls, keys: EpochKeys | None) -> Place:
        """The place that follows on these keys; the first without any."""
        return cls() if keys is None else cls(keys.session_id, keys.epoch + 1, keys.chain)

    @property
    def named(self) -> dict[str, Any]:
        """What the messages say of it."""
        return {"session": self.session_id.hex(), "epoch": self.epoch}


@dataclass(frozen=True)
class _Message:
    """A handshake message that was verified, and the bytes that were signed."""

    fields: dict[str, Any]
    body: bytes


def _common(kind: str, sender: tuple[str, str], receiver: tuple[str, str], parties: Parties) -> dict[str, Any]:
    """What every message says of itself, and its receiver has to find as it expects."""
    return {
        "message": kind,
        "version": VERSION,
        "rotate_every": parties.rotate_every,
        "sender": sender[0],
        "sender_fingerprint": sender[1],
        "receiver": receiver[0],
        "receiver_fingerprint": receiver[1],
    }


def _outer(public_key: bytes, body: bytes, signature: bytes) -> bytes:
    return pack({"public_key": public_key.hex(), "body": body.hex(), "signature": signature.hex()})


def _write(parties: Parties, kind: str, place: dict[str, Any], **content: str) -> tuple[bytes, bytes]:
    """A signed message, and the part of it that is signed."""
    own = parties.own
    names = _common(kind, (own.name, own.fingerprint), (parties.peer, parties.peer_fingerprint), parties)
    body = pack({**names, **place, **content})
    return _outer(own.public_key, body, own.sign(body)), body


def _read(parties: Parties, kind: str, place: dict[str, Any], message: bytes, *content: str) -> _Message:
    """
    Verifies a message: by the pinned fingerprint first, then the signature, then what it says of itself.

    Raises:
        HandshakeError: If anything is not as it has to be.
    """
    own, peer = parties.own, parties.peer
    body = _verified_body(parties, kind, message)
    try:
        fields = unpack(body)
    except ValueError as error:
        raise HandshakeError(f"The {kind} of {peer!r} is signed but no packed tree: {error}") from None
    expected = _common(kind, (peer, parties.peer_fingerprint), (own.name, own.fingerprint), parties) | place
    if not isinstance(fields, dict) or set(fields) != {*expected, *content}:
        raise HandshakeError(f"The {kind} of {peer!r} has other fields than {', '.join([*expected, *content])}.")
    for name, value in expected.items():
        # The type too: 1 == True, and a tensor's comparison has no truth value.
        if type(fields[name]) is not type(value) or fields[name] != value:
            advice = (
                " Give both parties the same rotate_every." if name == "rotate_every" else " Begin a new handshake."
            )
            raise HandshakeError(
                f"The {kind} of {peer!r} says {name} = {fields[name]!r}; {own.name!r} expects {value!r}.{advice}"
            )
    try:
        return _Message({name: bytes.fromhex(fields[name]) for name in content}, body)
    except (TypeError, ValueError):
        raise HandshakeError(f"The {kind} of {peer!r} holds something that is not hex.") from None


def _verified_body(parties: Parties, kind: str, message: bytes) -> bytes:
    """The signed part of a message, if it is the pinned party's."""
    peer = parties.peer
    if len(message) > MAX_MESSAGE_BYTES:
        raise HandshakeError(f"The {kind} of {peer!r} has {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are read.")
    try:
        outer = unpack(message)
    except ValueError as error:
        raise HandshakeError(f"What came as the {kind} of {peer!r} is no handshake message: {error}") from None
    if not isinstance(outer, dict) or not all(isinstance(value, str) for value in outer.values()):
        raise HandshakeError(f"What came as the {kind} of {peer!r} is no handshake message.")
    try:
        public_key, body, signature = (bytes.fromhex(outer[name]) for name in ("public_key", "body", "signature"))
    except (KeyError, ValueError):
        raise HandshakeError(f"What came as the {kind} of {peer!r} is no handshake message.") from None
    found = fingerprint_of(public_key)
    if found != parties.peer_fingerprint:
        raise HandshakeError(
            f"What came as the {kind} of {peer!r} is signed with the key {found}, but {parties.peer_fingerprint} is"
            f" pinned for {peer!r}. Compare the fingerprint with {peer!r} in another way: either its key is new, or"
            " somebody poses as it."
        )
    # One message has one form: what the signature does not cover may not differ either.
    if _outer(public_key, body, signature) != message or not is_signed(body, signature, public_key):
        raise HandshakeError(f"The signature of the {kind} of {peer!r} does not fit: it was changed on the way.")
    return body


def _transcript(*bodies: bytes) -> bytes:
    """The hash of what was said so far: that of the hashes of the signed parts, in order."""
    return hashlib.sha256(b"".join(hashlib.sha256(body).digest() for body in bodies)).digest()


def _peer_key(der: bytes, peer: str) -> bytes:
    try:
        load_public_key(der)
    except EncryptionError as error:
        raise HandshakeError(f"The encryption key of {peer!r} is refused: {error}") from None
    return der


def _unwrap_secret(wrapped: bytes, key: RSAPrivateKey, peer: str) -> bytes:
    try:
        secret = unwrap(wrapped, key)
    except EncryptionError as error:
        raise HandshakeError(f"The secret of {peer!r} is refused: {error}") from None
    if len(secret) != SECRET_BYTES:
        raise HandshakeError(f"The secret of {peer!r} has {len(secret)} bytes instead of {SECRET_BYTES}.")
    return secret


def _derive(place: Place, client_secret: bytes, server_secret: bytes, transcript: bytes) -> EpochKeys:
    """HKDF-SHA256 (RFC 5869): a key for each direction, and the salt of the next epoch."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # Without a previous epoch the salt is RFC 5869's zeros.
    kdf = HKDF(hashes.SHA256(), length=96, salt=place.chain, info=_KEY_INFO + transcript)
    material = kdf.derive(client_secret + server_secret)
    session_id = place.session_id or transcript
    return EpochKeys(session_id, place.epoch, material[:32], material[32:64], material[64:])


class ClientExchange:
    """The client's side of one handshake: `hello` to send, then [`~ClientExchange.finish`]."""

    def __init__(self, parties: Parties, place: Place, rsa_bits: int) -> None:
        self._parties = parties
        self._place = place
        self._key = generate_rsa_key(rsa_bits)
        own_key = encode_public_key(self._key.public_key()).hex()
        self.hello, self._hello_body = _write(parties, "hello", place.named, encryption_key=own_key)

    def finish(self, reply: bytes) -> tuple[bytes, EpochKeys]:
        """
        The last message, and the keys.

        Raises:
            HandshakeError: If the reply is not the pinned server's reply to this hello. The right one still counts.
        """
        parties, hello = self._parties, self._hello_body
        place = {**self._place.named, "transcript": _transcript(hello).hex()}
        message = _read(parties, "reply", place, reply, "encryption_key", "wrapped_secret")
        server_secret = _unwrap_secret(message.fields["wrapped_secret"], self._key, parties.peer)
        client_secret = os.urandom(SECRET_BYTES)
        wrapped = wrap(client_secret, _peer_key(message.fields["encryption_key"], parties.peer)).hex()
        place = {**self._place.named, "transcript": _transcript(hello, message.body).hex()}
        finish, body = _write(parties, "finish", place, wrapped_secret=wrapped)
        return finish, _derive(self._place, client_secret, server_secret, _transcript(hello, message.body, body))


class ServerExchange:
    """
    The server's side of one handshake: `reply` to send, then [`~ServerExchange.complete`].

    Raises:
        HandshakeError: If the hello is not the pinned client's.
    """

    def __init__(self, parties: Parties, place: Place, rsa_bits: int, hello: bytes) -> None:
        self._parties = parties
        self._place = place
        message = _read(parties, "hello", place.named, hello, "encryption_key")
        client_key = _peer_key(message.fields["encryption_key"], parties.peer)
        self._key = generate_rsa_key(rsa_bits)
        self._secret = os.urandom(SECRET_BYTES)
        self.reply, reply_body = _write(
            parties,
            "reply",
            {**place.named, "transcript": _transcript(message.body).hex()},
            encryption_key=encode_public_key(self._key.public_key()).hex(),
            wrapped_secret=wrap(self._secret, client_key).hex(),
        )
        self._bodies = (message.body, reply_body)

    def complete(self, finish: bytes) -> EpochKeys:
        """
        The keys.

        Raises:
            HandshakeError: If the message does not end this handshake. The right one still counts.
        """
        place = {**self._place.named, "transcript": _transcript(*self._bodies).hex()}
        message = _read(self._parties, "finish", place, finish, "wrapped_secret")
        client_secret = _unwrap_secret(message.fields["wrapped_secret"], self._key, self._parties.peer)
        return _derive(self._place, client_secret, self._secret, _transcript(*self._bodies, message.body))
