"""Envelopes between clients: only the one that is meant opens them."""

from __future__ import annotations

import pytest

from hf_federated.messages.serialization import pack, unpack
from hf_federated.security.envelope import PeerEnvelopes
from hf_federated.security.keys import EncryptionError, Identity, unwrap


@pytest.fixture(scope="module")
def peers() -> dict[str, PeerEnvelopes]:
    identities = {name: Identity.generate(name, 2048) for name in ("north", "south", "east")}
    fingerprints = {name: own.fingerprint for name, own in identities.items()}
    found = {name: PeerEnvelopes(own, fingerprints, 2048) for name, own in identities.items()}
    introductions = {name: own.introduction("run") for name, own in found.items()}
    for own in found.values():
        own.meet("run", introductions)
    return found


def test_an_envelope_opens_for_its_reader_and_purpose_alone(peers):
    envelope = peers["north"].seal("south", "step 3", b"parameters" * 100)
    assert b"parameters" not in envelope
    assert peers["south"].open("north", "step 3", envelope) == b"parameters" * 100
    for reader, sender, purpose in (("east", "north", "step 3"), ("south", "east", "step 3"), ("south", "north", "4")):
        with pytest.raises(EncryptionError, match="not signed by it"):
            peers[reader].open(sender, purpose, envelope)


def test_its_key_has_256_bits(peers):
    wrapped = unpack(peers["north"].seal("south", "step 3", b"parameters"))["wrapped"]
    assert len(unwrap(bytes(wrapped.tolist()), peers["south"]._private_key)) == 32


@pytest.mark.parametrize("field", ["wrapped", "nonce", "sealed", "signature"])
def test_a_changed_bit_is_refused(field, peers):
    tree = unpack(peers["north"].seal("south", "step 3", b"parameters"))
    tree[field] = tree[field].clone()
    tree[field][5] ^= 1
    with pytest.raises(EncryptionError, match="not signed by it"):
        peers["south"].open("north", "step 3", pack(tree))


def test_who_is_not_expected_is_not_met(peers):
    north, south = Identity.generate("north", 2048), Identity.generate("south", 2048)
    own = PeerEnvelopes(north, {"south": south.fingerprint}, 2048)
    own.meet("run", {"north": own.introduction("run")})
    with pytest.raises(EncryptionError, match="'west' takes part and its fingerprint is not known: .*--peer west="):
        own.meet("run", {"west": b""})
    with pytest.raises(EncryptionError, match="is expected"):
        own.meet("run", {"south": peers["south"].introduction("run")})
    there = PeerEnvelopes(south, {"north": north.fingerprint}, 2048)
    with pytest.raises(EncryptionError, match="not signed by it, or not for this run"):
        own.meet("run", {"south": there.introduction("another run")})
    with pytest.raises(EncryptionError, match="is damaged"):
        own.meet("run", {"south": b"nonsense"})
    with pytest.raises(EncryptionError, match="is not known"):
        own.seal("west", "step 3", b"")
    with pytest.raises(ValueError, match="sha256:"):
        PeerEnvelopes(north, {"south": "12:34"}, 2048)
