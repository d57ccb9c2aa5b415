"""Messages over gRPC that are encrypted in addition to TLS."""

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
    """Return a function that creates the server's encrypted session with a client, from their certificates."""
    identity = Identity.from_pem("server", (tls / "server.key").read_bytes())
    pinned = client_fingerprints(tls)
    return lambda client_id: ServerSession(identity, client_id, pinned[client_id], rsa_bits=2048, **settings)


def client_session(tls: Path, client_id: str, **settings: int) -> ClientSession:
    identity = Identity.from_pem(client_id, client_certificate(tls, client_id).with_suffix(".key").read_bytes())
    pinned = fingerprint((tls / "server.pem").read_bytes())
    return ClientSession(identity, "server", pinned, rsa_bits=2048, **settings)


def body_of(split: SplitModel) -> BodyServer:
    return split.boundary.link.server


class TamperingConnection:
    """A connection that can change messages, like a proxy that terminates TLS."""

    def __init__(self, link: GrpcLink) -> None:
        self.link = link
        self.hello, self.finish, self.check_size = link.hello, link.finish, link.check_size
        self.tamper = False

    def exchange(self, sealed: bytes) -> bytes:
        return self.link.exchange(sealed[:-1] + bytes([sealed[-1] ^ 1]) if self.tamper else sealed)


def test_encrypted_steps_with_key_rotation_and_broken_connections_match_a_single_process(tls):
    plain, split = (SplitModel.from_model(decoder("llama"), client_id="north") for _ in range(2))
    body, seen = body_of(split), []

    def answer(client_id: str, message: bytes) -> bytes:
        answered = body.answer(message)
        seen.append(message)
        # Cut the connection so that the answer is lost. The third message is the first message after a key rotation.
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
    assert all(torch.equal(parameter.grad, expected[name].grad) for name, parameter in split.named_parameters())


def test_handshake_with_repeated_messages_is_performed_once(tls):
    calls: list[str] = []
    make_session = server_sessions(tls)

    class CountingSession:
        """A session that records the calls of a handshake and cuts the connection after each call."""

        def __init__(self, client_id: str) -> None:
            self.session = make_session(client_id)
            self.open, self.seal = self.session.open, self.session.seal

        def reply(self, hello: bytes) -> bytes:
            calls.append("reply")
            answer = self.session.reply(hello)
            relay.cut()
            return answer

        def complete(self, finish: bytes) -> None:
            calls.append("complete")
            self.session.complete(finish)
            relay.cut()

    with serve(tls, lambda _, blob: blob, clients=["north"], encryption=CountingSession) as server:
        with Relay(server) as relay, join(tls, relay) as link:
            encrypted_link = EncryptedLink(client_session(tls, "north"), link)
            assert encrypted_link.exchange(b"states") == b"states"
    assert calls == ["reply", "complete"]


def test_tampered_message_is_rejected_and_gradients_are_unchanged(tls):
    split = SplitModel.from_model(decoder("llama"), client_id="north")
    body = body_of(split)
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, message: body.answer(message), **settings) as server, join(tls, server) as link:
        connection = TamperingConnection(link)
        split.boundary.link = EncryptedLink(client_session(tls, "north"), connection)
        split(**batch("right")).loss.backward()
        before = [parameter.grad.clone() for parameter in split.server_body.parameters()]
        loss = split(**batch("right", seed=1)).loss
        connection.tamper = True
        with pytest.raises(ValueError, match="is not authentic: it was changed or truncated"):
            loss.backward()
    after = [parameter.grad for parameter in split.server_body.parameters()]
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def test_too_large_message_is_not_encrypted_and_session_stays_usable(tls):
    largest = 1 << 14
    settings = {"clients": ["north"], "encryption": server_sessions(tls), "max_message_bytes": largest}
    with serve(tls, lambda _, blob: blob[:4], **settings) as server, join(tls, server) as link:
        encrypted_link = EncryptedLink(client_session(tls, "north"), link)
        assert encrypted_link.exchange(b"before") == b"befo"
        with pytest.raises(ValueError, match=f"has {largest + 1} bytes, but the server accepts at most {largest}"):
            encrypted_link.exchange(bytes(largest - 27))
        assert encrypted_link.exchange(bytes(largest - 28)) == bytes(4)
        assert encrypted_link.exchange(b"after") == b"afte"


def test_generation_over_encrypted_link_matches_unsplit_model(tls):
    whole = decoder("llama").eval()
    split = SplitModel.from_model(decoder("llama"), client_id="north").eval()
    body = body_of(split)
    inputs = {name: value for name, value in batch("left").items() if name != "labels"}
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "use_cache": True}
    expected = whole.generate(**inputs, **settings)
    assert expected.shape[1] == inputs["input_ids"].shape[1] + 6
    messages: list[bytes] = []

    def answer(client_id: str, message: bytes) -> bytes:
        messages.append(message)
        return body.answer(message)

    sessions = server_sessions(tls)
    with serve(tls, answer, clients=["north"], encryption=sessions) as server, join(tls, server) as link:
        split.boundary.link = EncryptedLink(client_session(tls, "north"), link)
        assert torch.equal(split.generate(**inputs, **settings), expected)
        # With other weights of the server body, the tokens differ. The tokens therefore depend on the server.
        for parameter in split.server_body.parameters():
            parameter.data.neg_()
        assert not torch.equal(split.generate(**inputs, **settings), expected)
    # Each of the two generations sends one message per token. The first message contains the prompt, and a last
    # message releases the cache.
    assert len(messages) >= 2 * 6


def test_clients_have_separate_keys(tls):
    barrier = threading.Barrier(2)

    def answer(client_id: str, message: bytes) -> bytes:
        barrier.wait(10)
        return client_id.encode() + message

    answers: dict[str, bytes] = {}

    def step(client_id: str) -> None:
        with join(tls, server, client_id) as link:
            answers[client_id] = EncryptedLink(client_session(tls, client_id), link).exchange(b" says")

    with serve(tls, answer, clients=["north", "south"], encryption=server_sessions(tls)) as server:
        threads = [threading.Thread(target=step, args=(client_id,)) for client_id in ("north", "south")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == {"north": b"north says", "south": b"south says"}


def test_encryption_on_one_side_only_is_rejected(tls):
    with serve(tls, lambda _, blob: blob, clients=["north"]) as server, join(tls, server) as link:
        with pytest.raises(ValueError, match="This server does not encrypt messages. Pass encryption="):
            EncryptedLink(client_session(tls, "north"), link).exchange(b"1")
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, blob: blob, **settings) as server, join(tls, server) as link:
        with pytest.raises(ValueError, match="The session with 'north' has no keys yet"):
            link.exchange(b"1")


def test_new_link_of_a_client_starts_with_new_keys(tls):
    settings = {"clients": ["north"], "encryption": server_sessions(tls)}
    with serve(tls, lambda _, blob: blob, **settings) as server:
        for _ in range(2):
            with join(tls, server) as link:
                assert EncryptedLink(client_session(tls, "north"), link).exchange(b"1") == b"1"
