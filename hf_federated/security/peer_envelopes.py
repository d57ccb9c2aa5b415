"""
Encrypted envelopes between the clients of a split model. The server forwards the envelopes but cannot read them.

The server must not learn the parameters of a head or tail, because they reveal a client's inputs.
Each client generates an RSA key for a run and signs the key with its [`~hf_federated.security.keys.Identity`]. The
other clients verify the identity by a pinned fingerprint, which they received over another channel. A payload is
encrypted with AES-256-GCM under a new key, and the key is encrypted for the recipient with RSA-OAEP. The sender signs
the envelope together with the run, the sender, the recipient and the purpose.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import torch

from ..messages.serialization import pack, unpack
from ..utils.printable import printable
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
    Encrypts payloads for other clients, and decrypts payloads from other clients.

    Args:
        identity ([`~hf_federated.security.keys.Identity`]): The identity of this client.
        fingerprints (`Mapping[str, str]`): Pinned fingerprints of the other clients, by client id.
        rsa_bits (`int`, *optional*, defaults to `3072`): Size in bits of the RSA key for the run.

    Raises:
        ImportError: If `cryptography` (extra `network`) is not installed.
        ValueError: If a fingerprint has another form, or `rsa_bits` is not allowed.

    Example:

    ```python
    >>> from hf_federated.security.peer_envelopes import PeerEnvelopes
    >>> from hf_federated.security.keys import Identity

    >>> north, south = Identity.generate("north", 2048), Identity.generate("south", 2048)
    >>> sender = PeerEnvelopes(north, {"south": south.fingerprint}, rsa_bits=2048)
    >>> recipient = PeerEnvelopes(south, {"north": north.fingerprint}, rsa_bits=2048)
    >>> keys = {"north": sender.signed_public_key("run 1"), "south": recipient.signed_public_key("run 1")}
    >>> sender.register_peers("run 1", keys)
    >>> recipient.register_peers("run 1", keys)
    >>> recipient.open("north", "step 3", sender.seal("south", "step 3", b"parameters"))
    b'parameters'
    ```
    """

    def __init__(self, identity: Identity, fingerprints: Mapping[str, str], rsa_bits: int = DEFAULT_RSA_BITS) -> None:
        require_cryptography("PeerEnvelopes")
        for peer, fingerprint in fingerprints.items():
            check_fingerprint(fingerprint, peer)
        self._identity = identity
        self._fingerprints = {name: value for name, value in fingerprints.items() if name != identity.name}
        self._private_key = generate_rsa_key(rsa_bits)
        self._run = ""
        # The encryption key and the signing key of each client.
        self._peers: dict[str, tuple[bytes, bytes]] = {}

    def signed_public_key(self, run: str) -> bytes:
        """
        Return the public key of this client for a run, signed with its identity.

        Send the result to the other clients. The server can forward it.

        Args:
            run (`str`): Name of the run. All clients must use the same name.
        """
        key = encode_public_key(self._private_key.public_key())
        signature = self._identity.sign(_KEY_TAG + _encode_names(run, self._identity.name) + key)
        return _pack_fields(identity=self._identity.public_key, key=key, signature=signature)

    def register_peers(self, run: str, signed_public_keys: Mapping[str, bytes]) -> None:
        """
        Verify and store the public keys of the other clients.

        Args:
            run (`str`): Name of the run.
            signed_public_keys (`Mapping[str, bytes]`): Return values of [`~PeerEnvelopes.signed_public_key`] of all
                participating clients, by client id.

        Raises:
            EncryptionError: If the fingerprint of a client is not known, or a signed key is damaged, belongs to
                another run, or has a signature of another identity.
        """
        self._run = run
        self._peers = {}
        for peer in signed_public_keys:
            if peer == self._identity.name:
                continue
            fingerprint = self._fingerprints.get(peer)
            if fingerprint is None:
                raise EncryptionError(
                    f"The fingerprint of client {peer!r} of this run is not known. Pass the fingerprint in "
                    f"`fingerprints`, or as --peer {printable(peer, 100)}=FINGERPRINT."
                )
            identity, key, signature = _unpack_fields(signed_public_keys[peer], ("identity", "key", "signature"), peer)
            if fingerprint_of(identity) != fingerprint:
                raise EncryptionError(
                    f"The signed public key of client {peer!r} has the fingerprint {fingerprint_of(identity)}, but "
                    f"{fingerprint} is expected. Verify the fingerprint with the client over another channel."
                )
            if not is_signed(_KEY_TAG + _encode_names(run, peer) + key, signature, identity):
                raise EncryptionError(
                    f"The public key of client {peer!r} is not signed by this client for this run. Start the client "
                    "with its own key, and in the same run."
                )
            self._peers[peer] = key, identity

    def seal(self, recipient: str, purpose: str, payload: bytes) -> bytes:
        """
        Encrypt and sign a payload for another client.

        Args:
            recipient (`str`): Id of the client that can decrypt the payload.
            purpose (`str`): Purpose of the payload. The recipient must open the envelope with the same purpose.
            payload (`bytes`): The data to encrypt.

        Returns:
            `bytes`: The envelope.

        Raises:
            EncryptionError: If the recipient is not registered.
        """
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key, _ = self._peer(recipient)
        secret, nonce = AESGCM.generate_key(256), os.urandom(_NONCE_BYTES)
        context = _encode_names(self._run, self._identity.name, recipient, purpose)
        sealed = AESGCM(secret).encrypt(nonce, payload, context)
        wrapped = wrap(secret, key)
        signature = self._identity.sign(_signed_content(context, wrapped, nonce, sealed))
        return _pack_fields(wrapped=wrapped, nonce=nonce, sealed=sealed, signature=signature)

    def open(self, sender: str, purpose: str, envelope: bytes) -> bytes:
        """
        Verify and decrypt an envelope.

        Args:
            sender (`str`): Id of the expected sender.
            purpose (`str`): The expected purpose.
            envelope (`bytes`): The return value of the sender's `seal`.

        Returns:
            `bytes`: The payload.

        Raises:
            EncryptionError: If the envelope has another sender, recipient, run or purpose, or was changed.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        _, identity = self._peer(sender)
        names = ("wrapped", "nonce", "sealed", "signature")
        wrapped, nonce, sealed, signature = _unpack_fields(envelope, names, sender)
        context = _encode_names(self._run, sender, self._identity.name, purpose)
        if not is_signed(_signed_content(context, wrapped, nonce, sealed), signature, identity):
            raise EncryptionError(
                f"The signature of an envelope from client {sender!r} for {purpose!r} is not valid: the envelope was "
                "changed, or belongs to another run, purpose or client."
            )
        try:
            return AESGCM(unwrap(wrapped, self._private_key)).decrypt(nonce, sealed, context)
        except InvalidTag:
            raise EncryptionError(
                f"The content of an envelope from client {sender!r} was changed between the clients. Resume the run "
                "from its last checkpoint."
            ) from None

    def _peer(self, name: str) -> tuple[bytes, bytes]:
        if name not in self._peers:
            raise EncryptionError(
                f"Client {name!r} is not registered. The registered clients are {sorted(self._peers)}. Pass the "
                f"signed public key of {name!r} to register_peers()."
            )
        return self._peers[name]


def _encode_names(*names: str) -> bytes:
    """Encode names with length prefixes, so that different names always have different encodings."""
    return b"".join(len(encoded).to_bytes(4, "big") + encoded for encoded in (name.encode() for name in names))


def _signed_content(context: bytes, wrapped: bytes, nonce: bytes, sealed: bytes) -> bytes:
    return _ENVELOPE_TAG + context + hashlib.sha256(wrapped).digest() + nonce + hashlib.sha256(sealed).digest()


def _pack_fields(**fields: bytes) -> bytes:
    """Pack the fields of a message to another client as uint8 vectors."""
    return pack({name: torch.frombuffer(bytearray(value), dtype=torch.uint8) for name, value in fields.items()})


def _unpack_fields(blob: bytes, names: tuple[str, ...], sender: str) -> list[bytes]:
    """Unpack the fields of a message from another client and check their types."""
    try:
        tree = unpack(blob)
    except ValueError as error:
        raise EncryptionError(f"The message from client {sender!r} is damaged: {error}") from None
    if not isinstance(tree, dict) or tree.keys() != set(names):
        raise EncryptionError(f"The message from client {sender!r} has other fields than {sorted(names)}.")
    for value in tree.values():
        if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
            raise EncryptionError(f"The message from client {sender!r} has a field that is not a uint8 vector.")
    return [tree[name].numpy().tobytes() for name in names]
