"""Encrypted envelopes between clients: only the intended recipient can open an envelope."""

from __future__ import annotations

import pytest

from hf_federated.messages.serialization import pack, unpack
from hf_federated.security import peer_envelopes
from hf_federated.security.keys import EncryptionError, Identity, wrap
from hf_federated.security.peer_envelopes import PeerEnvelopes


@pytest.fixture(scope="module")
def peers() -> dict[str, PeerEnvelopes]:
    identities = {name: Identity.generate(name, 2048) for name in ("north", "south", "east")}
    fingerprints = {name: identity.fingerprint for name, identity in identities.items()}
    envelopes = {name: PeerEnvelopes(identity, fingerprints, 2048) for name, identity in identities.items()}
    signed_public_keys = {name: client.signed_public_key("run") for name, client in envelopes.items()}
    for client in envelopes.values():
        client.register_peers("run", signed_public_keys)
    return envelopes


def test_envelope_opens_only_for_its_recipient_sender_and_purpose(peers):
    envelope = peers["north"].seal("south", "step 3", b"parameters" * 100)
    assert b"parameters" not in envelope
    assert peers["south"].open("north", "step 3", envelope) == b"parameters" * 100
    for reader, sender, purpose in (("east", "north", "step 3"), ("south", "east", "step 3"), ("south", "north", "4")):
        with pytest.raises(EncryptionError, match="The signature of an envelope .* is not valid"):
            peers[reader].open(sender, purpose, envelope)


def test_envelope_key_has_256_bits(peers, monkeypatch):
    wrapped = []
    monkeypatch.setattr(peer_envelopes, "wrap", lambda key, public_key: wrapped.append(key) or wrap(key, public_key))
    peers["north"].seal("south", "step 3", b"parameters")
    assert [len(key) for key in wrapped] == [32]


@pytest.mark.parametrize("field", ["wrapped", "nonce", "sealed", "signature"])
def test_flipped_bit_in_envelope_is_rejected(field, peers):
    tree = unpack(peers["north"].seal("south", "step 3", b"parameters"))
    tree[field] = tree[field].clone()
    tree[field][5] ^= 1
    with pytest.raises(EncryptionError, match="The signature of an envelope .* is not valid"):
        peers["south"].open("north", "step 3", pack(tree))


def test_unknown_or_unverified_peers_are_rejected(peers):
    north, south = Identity.generate("north", 2048), Identity.generate("south", 2048)
    of_north = PeerEnvelopes(north, {"south": south.fingerprint}, 2048)
    of_north.register_peers("run", {"north": of_north.signed_public_key("run")})
    with pytest.raises(
        EncryptionError, match="The fingerprint of client 'west' of this run is not known.*--peer west="
    ):
        of_north.register_peers("run", {"west": b""})
    with pytest.raises(EncryptionError, match="is expected"):
        of_north.register_peers("run", {"south": peers["south"].signed_public_key("run")})
    of_south = PeerEnvelopes(south, {"north": north.fingerprint}, 2048)
    with pytest.raises(EncryptionError, match="not signed by this client for this run"):
        of_north.register_peers("run", {"south": of_south.signed_public_key("another run")})
    with pytest.raises(EncryptionError, match="is damaged"):
        of_north.register_peers("run", {"south": b"nonsense"})
    with pytest.raises(EncryptionError, match="is not registered"):
        of_north.seal("west", "step 3", b"")
    with pytest.raises(ValueError, match="sha256:"):
        PeerEnvelopes(north, {"south": "12:34"}, 2048)
