"""A split model on an encrypted link: equal results, and no readable messages on the network."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from decoders import batch, decoder

from hf_federated import SplitModel
from hf_federated.security.encrypted_link import EncryptedLink, EncryptedServer
from hf_federated.security.encrypted_session import (
    ClientSession,
    EncryptionError,
    Identity,
    MessageError,
    ServerSession,
)


@pytest.fixture(scope="module")
def identities() -> tuple[Identity, Identity]:
    return Identity.generate("client", 2048), Identity.generate("server", 2048)


class RecordingConnection:
    """A connection to the server that records encrypted messages and answers, and can change messages."""

    def __init__(self, server: EncryptedServer) -> None:
        self.server = server
        self.hello, self.finish, self.check_size = server.hello, server.finish, server.check_size
        self.recorded: list[bytes] = []
        self.change = lambda sealed: sealed

    def exchange(self, sealed: bytes) -> bytes:
        answer = self.server.exchange(self.change(sealed))
        self.recorded += [sealed, answer]
        return answer


def encrypted_model(
    identities: tuple[Identity, Identity], **settings: int
) -> tuple[SplitModel, RecordingConnection, list[bytes]]:
    """A split model on an encrypted link, its connection, and the decrypted messages and answers of the server."""
    client, server = identities
    split = SplitModel.from_model(decoder("llama"))
    decrypted: list[bytes] = []
    answer = split.boundary.link.server.answer

    def recording_answer(blob: bytes) -> bytes:
        decrypted.append(blob)
        decrypted.append(answer(blob))
        return decrypted[-1]

    server_session = ServerSession(server, "client", client.fingerprint, rsa_bits=2048, **settings)
    client_session = ClientSession(client, "server", server.fingerprint, rsa_bits=2048, **settings)
    connection = RecordingConnection(EncryptedServer(server_session, recording_answer))
    split.boundary.link = EncryptedLink(client_session, connection)
    return split, connection, decrypted


def test_logits_and_gradients_match_unencrypted_model(identities):
    split, connection, decrypted = encrypted_model(identities)
    inputs = batch("right")
    plain = SplitModel.from_model(decoder("llama"))
    for model in (plain, split):
        model(**inputs).loss.backward()
    assert torch.equal(split(**inputs).logits, plain(**inputs).logits)
    expected = dict(plain.named_parameters())
    assert all(torch.equal(p.grad, expected[name].grad) for name, p in split.named_parameters())
    # Each encrypted message has 28 bytes more than its payload, and contains no part of the payload.
    assert [len(blob) for blob in connection.recorded] == [len(blob) + 28 for blob in decrypted]
    for message, blob in zip(decrypted, connection.recorded, strict=True):
        assert not any(message[start : start + 16] in blob for start in range(0, len(message) - 16, 97))


def test_keys_rotate_after_rotate_every_steps(identities):
    split, _, _ = encrypted_model(identities, rotate_every=2)
    session = split.boundary.link.session
    epochs = []
    for step in range(5):
        split.boundary.begin_step(step)
        split(**batch(None)).loss.backward()
        epochs.append(session.epoch)
    assert epochs == [0, 0, 1, 1, 2]


def test_answers_in_flight_are_decrypted_in_the_order_of_the_messages(identities):
    client, server = identities
    settings = {"rsa_bits": 2048, "rotate_every": 1}

    class PipelinedServer(EncryptedServer):
        def submit(self, sealed):
            answer = Future()
            try:
                answer.set_result(self.exchange(sealed))
            except ValueError as error:
                answer.set_exception(error)
            return answer

    def answer(blob):
        if blob == b"refused":
            raise ValueError("refused")
        return blob

    link = EncryptedLink(
        ClientSession(client, "server", server.fingerprint, **settings),
        PipelinedServer(ServerSession(server, "client", client.fingerprint, **settings), answer),
    )
    first, second = link.submit(b"first"), link.submit(b"second")
    assert link.exchange(b"third") == b"third"
    assert (second.result(), first.result(), second.result()) == (b"second", b"first", b"second")
    third, fourth = link.submit(b"third"), link.submit(b"fourth")
    assert (fourth.result(), third.result()) == (b"fourth", b"third")
    link.submit(b"last of its epoch")
    link.end_step()
    assert (link.submit(b"first of its epoch").result(), link.session.epoch) == (b"first of its epoch", 1)
    refused, following = link.submit(b"refused"), link.submit(b"following")
    assert following.result() == b"following"
    with pytest.raises(ValueError, match="refused"):
        refused.result()
    # A handshake waits for the answers in flight.
    last = link.submit(b"last")
    link.end_step()
    link.connect()
    assert (last.result(), link.exchange(b"next"), link.session.epoch) == (b"last", b"next", 2)


def test_repeated_message_gets_same_answer_without_repeating_work(identities):
    split, connection, decrypted = encrypted_model(identities)
    split(**batch(None)).loss.backward()
    grads = [p.grad.clone() for p in split.server_body.parameters()]
    num_processed = len(decrypted)
    assert connection.server.exchange(connection.recorded[-2]) == connection.recorded[-1]
    assert len(decrypted) == num_processed
    assert all(torch.equal(p.grad, grad) for p, grad in zip(split.server_body.parameters(), grads, strict=True))
    with pytest.raises(MessageError):
        connection.server.exchange(connection.recorded[0])


def test_changed_message_is_rejected_and_link_stays_usable(identities):
    split, connection, decrypted = encrypted_model(identities)
    link = split.boundary.link
    link.connect()
    blob = link.session.seal(b"no message")
    with pytest.raises(EncryptionError):
        connection.server.exchange(blob[:-1] + bytes([blob[-1] ^ 1]))
    assert not decrypted
    # The payload is not a message of a split model. The server raises the same error when the message arrives again.
    for _attempt in range(2):
        with pytest.raises(ValueError, match="Not a packed tree"):
            connection.server.exchange(blob)
    split(**batch(None)).loss.backward()


def test_session_with_key_of_another_client_is_rejected(identities):
    _, server = identities
    split, connection, _ = encrypted_model((Identity.generate("client", 2048), server))
    link = split.boundary.link
    link.session = ClientSession(identities[0], "server", server.fingerprint, rsa_bits=2048)
    with pytest.raises(EncryptionError):
        split(**batch(None))
    assert not connection.recorded
