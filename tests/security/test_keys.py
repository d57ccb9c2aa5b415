"""Identities, fingerprints, key sizes and the arguments of sessions."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from sessions import connected_sessions, perform_handshake

from hf_federated.messages.serialization import unpack
from hf_federated.security.encrypted_session import (
    ClientSession,
    EncryptionError,
    Identity,
    fingerprint,
)
from hf_federated.security.handshake import HandshakeContext
from hf_federated.security.keys import encode_public_key, generate_rsa_key, wrap


def test_default_rsa_key_has_3072_bits(parties):
    from cryptography.hazmat.primitives.serialization import load_der_public_key

    north, center = parties["north"], parties["center"]
    hello = ClientSession(north, "center", center.fingerprint).hello()
    der = bytes.fromhex(unpack(bytes.fromhex(unpack(hello)["body"]))["encryption_key"])
    assert load_der_public_key(der).key_size == 3072


def test_session_keys_have_256_bits_and_secrets_use_oaep_with_sha256(parties, epoch_keys):
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP

    connected_sessions(parties)
    (keys,) = epoch_keys["client"]
    assert len(keys.client_to_server) == len(keys.server_to_client) == 32
    assert keys.client_to_server != keys.server_to_client
    private, secret = generate_rsa_key(2048), bytes(range(32))
    wrapped = wrap(secret, encode_public_key(private.public_key()))
    assert private.decrypt(wrapped, OAEP(MGF1(hashes.SHA256()), hashes.SHA256(), label=None)) == secret


def texts_of(item) -> list[str]:
    """The texts of an object and, if its class is of the package, of its attributes."""
    if isinstance(item, tuple):
        return [text for part in item for text in texts_of(part)]
    texts = [repr(item), str(item)]
    # A dataclass hides its secrets in its own text.
    if type(item).__module__.startswith("hf_federated.") and not dataclasses.is_dataclass(item):
        texts += [text for value in vars(item).values() for text in texts_of(value)]
    return texts


def test_repr_and_logs_contain_no_secrets(parties, private_keys, epoch_keys, caplog):
    caplog.set_level(logging.DEBUG)
    client, server = connected_sessions(parties, rotate_every=1)
    client.end_step()
    perform_handshake(client, server)
    client.hello()
    keys = epoch_keys["client"][-1]
    numbers = [key.private_numbers() for key in private_keys.values()]
    secrets = [keys.client_to_server, keys.server_to_client, keys.chaining_key]
    forms = [form for secret in secrets for form in (repr(secret)[2:-1], secret.hex(), str(list(secret))[1:-1])]
    forms += [form for number in numbers for form in (str(number.d), f"{number.d:x}", str(number.p), str(number.q))]
    texts = texts_of((parties["north"], client, server, keys, HandshakeContext.after(keys))) + [caplog.text]
    assert any("DirectionCipher" in text for text in texts) and any("ClientHandshake" in text for text in texts)
    assert not [form for form in forms if any(form in text for text in texts)]
    assert repr(client) == "ClientSession('north' with 'center', epoch=1, steps=0, sealed=1, opened=0)"


def test_fingerprint_is_digest_of_public_key(parties, private_keys):
    import hashlib

    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    north = parties["north"]
    public = private_keys["north"].public_key()
    der = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert north.fingerprint == fingerprint(pem) == f"sha256:{hashlib.sha256(der).hexdigest()}"
    with pytest.raises(EncryptionError, match="neither a certificate nor a public key"):
        fingerprint(b"north")
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    with pytest.raises(EncryptionError, match="The key is not an RSA key"):
        fingerprint(curve.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def test_identity_from_pem(parties, private_keys):
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = private_keys["north"]
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    assert Identity.from_pem("north", pem).fingerprint == parties["north"].fingerprint
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    for wrong in (locked, b"", pem[:200]):
        with pytest.raises(EncryptionError, match="key of 'north' is not a private key in PEM without a password"):
            Identity.from_pem("north", wrong)


def test_invalid_arguments_raise_value_error(parties, private_keys):
    north, pin = parties["north"], parties["center"].fingerprint
    with pytest.raises(ValueError, match="rsa_bits=1024 is not allowed. Set it to 2048 to 8192"):
        ClientSession(north, "center", pin, rsa_bits=1024)
    with pytest.raises(ValueError, match="rotate_every=0 is not allowed. Set it to 1 step or more"):
        ClientSession(north, "center", pin, rotate_every=0)
    for wrong in ("", pin.upper(), pin[7:], pin + "\n"):
        with pytest.raises(ValueError, match="given for 'center' is .*64 lower-case hex digits"):
            ClientSession(north, "center", wrong)
    with pytest.raises(ValueError, match="rsa_bits=1024"):
        Identity.generate("north", 1024)
    with pytest.raises(ValueError, match="empty string"):
        Identity("", private_keys["north"])


def test_missing_cryptography_error_names_extra(parties, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pin = parties["center"].fingerprint
    for make in (
        lambda: ClientSession(parties["north"], "center", pin),
        lambda: Identity.generate("north"),
        lambda: Identity.from_pem("north", b""),
        lambda: fingerprint(b""),
    ):
        with pytest.raises(
            ImportError, match=r"needs cryptography. Install with: pip install 'hf-federated\[network\]'"
        ):
            make()
