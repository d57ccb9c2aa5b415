"""Messages sealed on top of TLS, carried over gRPC."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from decoders import batch, decoder
from loopback import Relay, certificates, join, serve

from hf_federated import SplitModel
from hf_federated.security.certificates import client_certificate, client_fingerprints
from hf_federated.security.encrypted_link import EncryptedLink
from hf_federated.security.encrypted_session import ClientSession, Identity, ServerSession, fingerprint
from hf_federated.split import BodyServer
from hf_federated.transport import GrpcLink


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
        self.hello, self.finish, self.check_size = link.hello, link.finish, link.check_size
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
        split.boundary.link = EncryptedLink(client_session(tls, "north", rotate_every=1), link)
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
            sealed = EncryptedLink(client_session(tls, "north"), link)
            assert sealed.exchange(b"states") == b"states"
    assert made == ["reply", "complete"]


def test_a_message_changed_on_its_way_is_refused_and_leaves_the_body_as_it_was(tls):
    split = SplitModel.from_model(decoder("llama"), client_id="north")
    body = body_of(split)
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, message: body.answer(message), **settings) as server, join(tls, server) as link:
        carrier = Tampering(link)
        split.boundary.link = EncryptedLink(client_session(tls, "north"), carrier)
        split(**batch("right")).loss.backward()
        before = [own.grad.clone() for own in split.server_body.parameters()]
        loss = split(**batch("right", seed=1)).loss
        carrier.tamper = True
        with pytest.raises(ValueError, match="is not authentic: it was changed or cut"):
            loss.backward()
    assert all(torch.equal(own.grad, old) for own, old in zip(split.server_body.parameters(), before, strict=True))


def test_a_message_that_is_too_large_is_not_sealed_and_the_session_goes_on(tls):
    largest = 1 << 14
    settings = {"clients": ["north"], "encryption": server_sessions(tls), "max_message_bytes": largest}
    with serve(tls, lambda _, blob: blob[:4], **settings) as server, join(tls, server) as link:
        sealed = EncryptedLink(client_session(tls, "north"), link)
        assert sealed.exchange(b"before") == b"befo"
        with pytest.raises(ValueError, match=f"has {largest + 1} bytes, and the server takes at most {largest}"):
            sealed.exchange(bytes(largest - 27))
        assert sealed.exchange(bytes(largest - 28)) == bytes(4)
        assert sealed.exchange(b"after") == b"afte"


def test_generated_tokens_over_a_sealed_network_are_the_unsplit_models(tls):
    whole = decoder("llama").eval()
    split = SplitModel.from_model(decoder("llama"), client_id="north").eval()
    body = body_of(split)
    inputs = {name: value for name, value in batch("left").items() if name != "labels"}
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "use_cache": True}
    expected = whole.generate(**inputs, **settings)
    assert expected.shape[1] == inputs["input_ids"].shape[1] + 6
    carried: list[bytes] = []

    def answer(client_id: str, message: bytes) -> bytes:
        carried.append(message)
        return body.answer(message)

    sessions = server_sessions(tls)
    with serve(tls, answer, clients=["north"], encryption=sessions) as server, join(tls, server) as link:
        split.boundary.link = EncryptedLink(client_session(tls, "north"), link)
        assert torch.equal(split.generate(**inputs, **settings), expected)
        # Against a body that has other weights they differ: tokens do come from there.
        for own in split.server_body.parameters():
            own.data.neg_()
        assert not torch.equal(split.generate(**inputs, **settings), expected)
    # A passage a token, the first with the prompt, and the cache is let go in the end.
    assert len(carried) >= 2 * 6


def test_two_clients_have_keys_of_their_own(tls):
    together = threading.Barrier(2)

    def answer(client_id: str, message: bytes) -> bytes:
        together.wait(10)
        return client_id.encode() + message

    answers: dict[str, bytes] = {}

    def step(client_id: str) -> None:
        with join(tls, server, client_id) as link:
            answers[client_id] = EncryptedLink(client_session(tls, client_id), link).exchange(b" says")

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
            EncryptedLink(client_session(tls, "north"), link).exchange(b"1")
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, blob: blob, **settings) as server, join(tls, server) as link:
        with pytest.raises(ValueError, match="There are no keys with 'north' yet"):
            link.exchange(b"1")


def test_a_new_link_of_a_client_begins_with_new_keys(tls):
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, blob: blob, **settings) as server:
        for _ in range(2):
            with join(tls, server) as link:
                assert EncryptedLink(client_session(tls, "north"), link).exchange(b"1") == b"1"
