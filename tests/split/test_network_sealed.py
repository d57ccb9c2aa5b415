"""Messages sealed on top of TLS, carried over gRPC."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from decoders import batch, decoder
from loopback import Relay, certificates, join, serve

from hf_federated import SplitModel
from hf_federated.split import BodyServer, SealedLink
from hf_federated.split.certificates import client_certificate, client_fingerprints
from hf_federated.split.encryption import ClientSession, Identity, ServerSession, fingerprint
from hf_federated.split.network import GrpcLink


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"), ["north", "south"])


def server_sessions(tls: Path, **settings: int):
    """Makes a server's session of keys with a client, both known by their certificates."""
    identity = Identity.from_pem("server", (tls / "server.key").read_bytes())
    pinned = client_fingerprints(tls)
    return lambda client_id: ServerSession(identity, client_id, pinned[client_id], rsa_bits=2048, **settings)


def client_session(tls: Path, client_id: str, **settings: int) -> ClientSession:
    identity = Identity.from_pem(client_id, client_certificate(tls, client_id).with_suffix(".key").read_bytes())
    pinned = fingerprint((tls / "server.pem").read_bytes())
    return ClientSession(identity, "server", pinned, rsa_bits=2048, **settings)


def body_of(split: SplitModel) -> BodyServer:
    return split.boundary.link.server


class Tampering:
    """Changes a message on its way, as where TLS ends before the server does."""

    def __init__(self, link: GrpcLink) -> None:
        self.link = link
        self.hello, self.finish = link.hello, link.finish
        self.tamper = False

    def exchange(self, sealed: bytes) -> bytes:
        return self.link.exchange(sealed[:-1] + bytes([sealed[-1] ^ 1]) if self.tamper else sealed)


def test_sealed_steps_with_new_keys_are_those_of_one_process_although_the_connection_breaks(tls):
    plain, split = (SplitModel.from_model(decoder("llama"), client_id="north") for _ in range(2))
    body, seen = body_of(split), []

    def answer(client_id: str, message: bytes) -> bytes:
        answered = body.answer(message)
        seen.append(message)
        # The answer is lost, and with it any of a handshake's: the third message follows on new keys.
        relay.cut()
        return answered

    settings = {"clients": ["north"], "encryption": server_sessions(tls, rotate_every=1)}
    with serve(tls, answer, **settings) as server, Relay(server) as relay, join(tls, relay) as link:
        split.boundary.link = SealedLink(client_session(tls, "north", rotate_every=1), link)
        for step in range(2):
            for model in (plain, split):
                model.boundary.begin_step(step)
                model(**batch("right", seed=step)).loss.backward()
        assert split.boundary.link.session.epoch == 1
    assert len(seen) == 4
    expected = dict(plain.named_parameters())
    assert all(torch.equal(own.grad, expected[name].grad) for name, own in split.named_parameters())


def test_a_handshake_whose_messages_come_again_is_made_once(tls):
    made: list[str] = []
    make = server_sessions(tls)

    class Counting:
        """A session that breaks the connection whenever it has answered."""

        def __init__(self, client_id: str) -> None:
            self.session = make(client_id)
            self.open, self.seal = self.session.open, self.session.seal

        def reply(self, hello: bytes) -> bytes:
            made.append("reply")
            answer = self.session.reply(hello)
            relay.cut()
            return answer

        def complete(self, finish: bytes) -> None:
            made.append("complete")
            self.session.complete(finish)
            relay.cut()

    with serve(tls, lambda _, blob: blob, clients=["north"], encryption=Counting) as server:
        with Relay(server) as relay, join(tls, relay) as link:
            sealed = SealedLink(client_session(tls, "north"), link)
            assert sealed.exchange(b"states") == b"states"
    assert made == ["reply", "complete"]


def test_a_message_changed_on_its_way_is_refused_and_leaves_the_body_as_it_was(tls):
    split = SplitModel.from_model(decoder("llama"), client_id="north")
    body = body_of(split)
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, message: body.answer(message), **settings) as server, join(tls, server) as link:
        carrier = Tampering(link)
        split.boundary.link = SealedLink(client_session(tls, "north"), carrier)
        split(**batch("right")).loss.backward()
        before = [own.grad.clone() for own in split.server_body.parameters()]
        loss = split(**batch("right", seed=1)).loss
        carrier.tamper = True
        with pytest.raises(ValueError, match="is not authentic: it was changed or cut"):
            loss.backward()
    assert all(torch.equal(own.grad, old) for own, old in zip(split.server_body.parameters(), before, strict=True))


def test_two_clients_have_keys_of_their_own(tls):
    together = threading.Barrier(2)

    def answer(client_id: str, message: bytes) -> bytes:
        together.wait(10)
        return client_id.encode() + message

    answers: dict[str, bytes] = {}

    def step(client_id: str) -> None:
        with join(tls, server, client_id) as link:
            answers[client_id] = SealedLink(client_session(tls, client_id), link).exchange(b" says")

    with serve(tls, answer, clients=["north", "south"], encryption=server_sessions(tls)) as server:
        threads = [threading.Thread(target=step, args=(own,)) for own in ("north", "south")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {"north": b"north says", "south": b"south says"}


def test_sealing_on_one_side_alone_is_refused_in_words(tls):
    with serve(tls, lambda _, blob: blob, clients=["north"]) as server, join(tls, server) as link:
        with pytest.raises(ValueError, match="This server seals no messages: give it encryption="):
            SealedLink(client_session(tls, "north"), link).exchange(b"1")
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, blob: blob, **settings) as server, join(tls, server) as link:
        with pytest.raises(ValueError, match="There are no keys with 'north' yet"):
            link.exchange(b"1")


def test_a_new_link_of_a_client_begins_with_new_keys(tls):
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, blob: blob, **settings) as server:
        for _ in range(2):
            with join(tls, server) as link:
                assert SealedLink(client_session(tls, "north"), link).exchange(b"1") == b"1"
