"""Sealed envelopes from one client of a split model to another, which the server carries and cannot read.

Parameters of a head or tail must not come into the server's hands: with them it could compute what a client sends.
Each client makes an RSA key for a run, which its [`~split.keys.Identity`] signs; others know the identity by a
fingerprint that was given to them on another way. A payload is sealed with AES-256-GCM under a fresh key, which is
wrapped for its reader with RSA-OAEP; the writer signs the whole, with who writes to whom in which run and for what.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch

from ..messages.serialization import pack, unpack
from .keys import (
    DEFAULT_RSA_BITS,
    EncryptionError,
    Identity,
    check_fingerprint,
    encode_public_key,
    fingerprint_of,
    generate_rsa_key,
    is_signed,
    require_cryptography,
    unwrap,
    wrap,
)


_NONCE_BYTES = 12
_KEY_TAG = b"peer key\0"
_ENVELOPE_TAG = b"envelope\0"


class PeerEnvelopes:
    """
    Seals payloads for other clients, and opens theirs.

    Args:
        identity ([`~split.keys.Identity`]): This client's.
        fingerprints (`Mapping[str, str]`): By client id, those of the others.
        rsa_bits (`int`, *optional*, defaults to `3072`): Of the key that is made for the run.

    Raises:
        ValueError: If a fingerprint is not one.

    Example:

    ```python
    >>> from hf_federated.security.envelope import PeerEnvelopes
    >>> from hf_federated.security.keys import Identity

    >>> north, south = Identity.generate("north", 2048), Identity.generate("south", 2048)
    >>> here = PeerEnvelopes(north, {"south": south.fingerprint}, rsa_bits=2048)
    >>> there = PeerEnvelopes(south, {"north": north.fingerprint}, rsa_bits=2048)
    >>> introductions = {"north": here.introduction("run 1"), "south": there.introduction("run 1")}
    >>> here.meet("run 1", introductions)
    >>> there.meet("run 1", introductions)
    >>> there.open("north", "step 3", here.seal("south", "step 3", b"parameters"))
    b'parameters'
    ```
    """

    def __init__(self, identity: Identity, fingerprints: Mapping[str, str], rsa_bits: int = DEFAULT_RSA_BITS) -> None:
        require_cryptography("PeerEnvelopes")
        for peer, fingerprint in fingerprints.items():
            check_fingerprint(fingerprint, peer)
        self._identity = identity
        self._fingerprints = {name: own for name, own in fingerprints.items() if name != identity.name}
        self._private_key = generate_rsa_key(rsa_bits)
        self._run = ""
        # By client: the key that wraps for it, and the one that its signatures are of.
        self._peers: dict[str, tuple[bytes, bytes]] = {}

    def introduction(self, run: str) -> bytes:
        """
        What others need to write to this client, for the server to carry.

        Args:
            run (`str`): Which run, the same for all.
        """
        key = encode_public_key(self._private_key.public_key())
        signature = self._identity.sign(_KEY_TAG + _named(run, self._identity.name) + key)
        parts = {"identity": self._identity.public_key, "key": key, "signature": signature}
        return pack({name: _as_tensor(value) for name, value in parts.items()})

    def meet(self, run: str, introductions: Mapping[str, bytes]) -> None:
        """
        Take the others' introductions.

        Args:
            run (`str`): Which run.
            introductions (`Mapping[str, bytes]`): By client id, of all that take part.

        Raises:
            EncryptionError: If the fingerprint of one is not known, or an introduction is damaged, of another run, or
                not of the identity that is expected.
        """
        self._run = run
        self._peers = {}
        for peer in introductions:
            if peer == self._identity.name:
                continue
            fingerprint = self._fingerprints.get(peer)
            if fingerprint is None:
                raise EncryptionError(
                    f"Client {peer!r} takes part and its fingerprint is not known: give it, in `fingerprints` or as "
                    f"--peer {peer}=FINGERPRINT."
                )
            identity, key, signature = _fields(introductions[peer], ("identity", "key", "signature"), peer)
            if fingerprint_of(identity) != fingerprint:
                raise EncryptionError(
                    f"Who introduced itself as client {peer!r} has the fingerprint {fingerprint_of(identity)}, and "
                    f"{fingerprint} is expected."
                )
            if not is_signed(_KEY_TAG + _named(run, peer) + key, signature, identity):
                raise EncryptionError(
                    f"The key that came for client {peer!r} is not signed by it, or not for this run."
                )
            self._peers[peer] = key, identity

    def seal(self, recipient: str, purpose: str, payload: bytes) -> bytes:
        """
        Seal a payload.

        Args:
            recipient (`str`): The client that may read it.
            purpose (`str`): What it is for; it opens for nothing else.
            payload (`bytes`): What is sealed.

        Raises:
            EncryptionError: If the recipient is not known.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key, _ = self._peer(recipient)
        secret, nonce = AESGCM.generate_key(256), os.urandom(_NONCE_BYTES)
        context = _named(self._run, self._identity.name, recipient, purpose)
        sealed = AESGCM(secret).encrypt(nonce, payload, context)
        wrapped = wrap(secret, key)
        signature = self._identity.sign(_signed(context, wrapped, nonce, sealed))
        parts = {"wrapped": wrapped, "nonce": nonce, "sealed": sealed, "signature": signature}
        return pack({name: _as_tensor(value) for name, value in parts.items()})

    def open(self, sender: str, purpose: str, envelope: bytes) -> bytes:
        """
        Open an envelope.

        Args:
            sender (`str`): The client that must have written it.
            purpose (`str`): What it must be for.
            envelope (`bytes`): What `seal` made.

        Raises:
            EncryptionError: If it is of another client, for another one, run or purpose, or was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        _, identity = self._peer(sender)
        wrapped, nonce, sealed, signature = _fields(envelope, ("wrapped", "nonce", "sealed", "signature"), sender)
        context = _named(self._run, sender, self._identity.name, purpose)
        if not is_signed(_signed(context, wrapped, nonce, sealed), signature, identity):
            raise EncryptionError(
                f"An envelope from client {sender!r} for {purpose!r} is not signed by it: it was changed, or is of "
                "another run, purpose or client."
            )
        try:
            return AESGCM(unwrap(wrapped, self._private_key)).decrypt(nonce, sealed, context)
        except InvalidTag:
            raise EncryptionError(f"An envelope from client {sender!r} was changed.") from None

    def _peer(self, name: str) -> tuple[bytes, bytes]:
        if name not in self._peers:
            raise EncryptionError(f"Client {name!r} is not known: known are {sorted(self._peers)}.")
        return self._peers[name]


def _named(*names: str) -> bytes:
    """Names as bytes that are no other names' too."""
    return b"".join(len(own).to_bytes(4, "big") + own for own in (name.encode() for name in names))


def _signed(context: bytes, wrapped: bytes, nonce: bytes, sealed: bytes) -> bytes:
    return _ENVELOPE_TAG + context + hashlib.sha256(wrapped).digest() + nonce + hashlib.sha256(sealed).digest()


def _as_tensor(value: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(value), dtype=torch.uint8)


def _fields(blob: bytes, names: tuple[str, ...], sender: str) -> list[bytes]:
    """Fields of what came."""
    try:
        tree = unpack(blob)
    except ValueError as error:
        raise EncryptionError(f"What came from client {sender!r} is damaged: {error}") from None
    if not isinstance(tree, dict) or tree.keys() != set(names):
        raise EncryptionError(f"What came from client {sender!r} has other fields than {sorted(names)}.")
    for value in tree.values():
        if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
            raise EncryptionError(f"What came from client {sender!r} holds no bytes.")
    return [tree[name].numpy().tobytes() for name in names]
