"""A split model whose messages are sealed: the same numbers, and nothing to read on the way."""

from __future__ import annotations

import pytest
import torch
from decoders import batch, decoder

from hf_federated import SplitModel
from hf_federated.security.encryption import ClientSession, EncryptionError, Identity, MessageError, ServerSession
from hf_federated.security.sealed import SealedLink, SealedServer


@pytest.fixture(scope="module")
def identities() -> tuple[Identity, Identity]:
    return Identity.generate("client", 2048), Identity.generate("server", 2048)


class Carrier:
    """What carries sealed messages, keeps them, and may change them on the way."""

    def __init__(self, server: SealedServer) -> None:
        self.server = server
        self.hello, self.finish, self.check_size = server.hello, server.finish, server.check_size
        self.carried: list[bytes] = []
        self.change = lambda sealed: sealed

    def exchange(self, sealed: bytes) -> bytes:
        answer = self.server.exchange(self.change(sealed))
        self.carried += [sealed, answer]
        return answer


def sealed(identities: tuple[Identity, Identity], **settings: int) -> tuple[SplitModel, Carrier, list[bytes]]:
    """A split model behind a sealed link, its carrier, and what the server saw."""
    client, server = identities
    split = SplitModel.from_model(decoder("llama"))
    seen: list[bytes] = []
    answer = split.boundary.link.server.answer

    def watched(blob: bytes) -> bytes:
        seen.append(blob)
        seen.append(answer(blob))
        return seen[-1]

    there = ServerSession(server, "client", client.fingerprint, rsa_bits=2048, **settings)
    here = ClientSession(client, "server", server.fingerprint, rsa_bits=2048, **settings)
    carrier = Carrier(SealedServer(there, watched))
    split.boundary.link = SealedLink(here, carrier)
    return split, carrier, seen


def test_logits_and_gradients_are_the_same_and_nothing_can_be_read(identities):
    split, carrier, seen = sealed(identities)
    inputs = batch("right")
    plain = SplitModel.from_model(decoder("llama"))
    for model in (plain, split):
        model(**inputs).loss.backward()
    assert torch.equal(split(**inputs).logits, plain(**inputs).logits)
    expected = dict(plain.named_parameters())
    assert all(torch.equal(p.grad, expected[name].grad) for name, p in split.named_parameters())
    # 28 bytes more for each message, and no run of its bytes.
    assert [len(blob) for blob in carrier.carried] == [len(blob) + 28 for blob in seen]
    for message, blob in zip(seen, carrier.carried, strict=True):
        assert not any(message[start : start + 16] in blob for start in range(0, len(message) - 16, 97))


def test_keys_are_made_anew_after_so_many_steps(identities):
    split, _, _ = sealed(identities, rotate_every=2)
    session = split.boundary.link.session
    epochs = []
    for step in range(5):
        split.boundary.begin_step(step)
        split(**batch(None)).loss.backward()
        epochs.append(session.epoch)
    assert epochs == [0, 0, 1, 1, 2]


def test_a_message_that_comes_again_is_answered_alike_and_not_done_twice(identities):
    split, carrier, seen = sealed(identities)
    split(**batch(None)).loss.backward()
    grads = [p.grad.clone() for p in split.server_body.parameters()]
    done = len(seen)
    assert carrier.server.exchange(carrier.carried[-2]) == carrier.carried[-1]
    assert len(seen) == done
    assert all(torch.equal(p.grad, own) for p, own in zip(split.server_body.parameters(), grads, strict=True))
    with pytest.raises(MessageError):
        carrier.server.exchange(carrier.carried[0])


def test_a_message_changed_on_its_way_is_refused_and_the_next_one_is_not(identities):
    split, carrier, seen = sealed(identities)
    link = split.boundary.link
    link.connect()
    blob = link.session.seal(b"no message")
    with pytest.raises(EncryptionError):
        carrier.server.exchange(blob[:-1] + bytes([blob[-1] ^ 1]))
    assert not seen
    # The message itself is no message of a split model: the server's error is the same when it comes again.
    for _attempt in range(2):
        with pytest.raises(ValueError, match="Not a packed tree"):
            carrier.server.exchange(blob)
    split(**batch(None)).loss.backward()


def test_another_clients_key_opens_nothing(identities):
    _, server = identities
    split, carrier, _ = sealed((Identity.generate("client", 2048), server))
    link = split.boundary.link
    link.session = ClientSession(identities[0], "server", server.fingerprint, rsa_bits=2048)
    with pytest.raises(EncryptionError):
        split(**batch(None))
    assert not carrier.carried
