"""A split model over gRPC with mutual TLS: equal results, and readable errors."""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from decoders import batch, decoder
from loopback import CLIENTS, SESSION_CONFIG, certificates, join, serve, wait_until

from hf_federated import SplitModel
from hf_federated.split import ClientBatchRunner
from hf_federated.transport import (
    AnswerTimeoutError,
    GrpcConnection,
    GrpcTransport,
    LinkError,
    ServerFailedError,
    ServerUnreachableError,
    SessionLostError,
    connection,
)


MIB = 1 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"))


class Body:
    """Answers messages with a server body, one message at a time, for any client."""

    def __init__(self, split: SplitModel) -> None:
        self.server = split.boundary.link.server
        self._batch_runner = ClientBatchRunner(self.server)
        self._lock = threading.Lock()

    def __call__(self, client_id: str, message: bytes) -> bytes:
        with self._lock:
            return self._batch_runner.link(client_id).exchange(message)


def gradients(split: SplitModel) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in split.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        reference = expected[name]
        assert (gradient is None and reference is None) or torch.equal(gradient, reference), name


def test_logits_and_gradients_match_a_single_process(tls):
    plain, split = (SplitModel.from_model(decoder("llama"), client_id="north") for _ in range(2))
    with serve(tls, Body(split)) as server, join(tls, server) as link:
        split.boundary.link = link
        outputs = [model(**batch("right")) for model in (plain, split)]
        for output in outputs:
            output.loss.backward()
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert all(gradient is not None for gradient in gradients(split).values())
    assert_equal(gradients(split), gradients(plain))


def test_concurrent_clients_get_their_own_gradients(tls):
    models = {client_id: SplitModel.from_model(decoder("llama"), client_id=client_id) for client_id in CLIENTS}
    expected = {}
    for seed, (client_id, split) in enumerate(models.items()):
        split(**batch("right", seed=seed)).loss.backward()
        expected[client_id] = gradients(split)
        split.zero_grad()
    bodies = {client_id: Body(split) for client_id, split in models.items()}

    def train(client_id: str, seed: int) -> None:
        with join(tls, server, client_id) as link:
            models[client_id].boundary.link = link
            models[client_id](**batch("right", seed=seed)).loss.backward()

    with serve(tls, lambda client_id, message: bodies[client_id](client_id, message)) as server:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(train, CLIENTS, range(3)))
    for client_id, split in models.items():
        assert_equal(gradients(split), expected[client_id])


def test_answers_can_wait_for_messages_of_all_clients(tls):
    barrier = threading.Barrier(3)

    def answer(client_id: str, message: bytes) -> bytes:
        barrier.wait(10)
        return message + client_id.encode()

    def step(client_id: str) -> list[bytes]:
        with join(tls, server, client_id) as link:
            return [link.exchange(b"1"), link.exchange(b"2")]

    with serve(tls, answer) as server, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(step, CLIENTS))
    assert answers == [[b"1" + client_id.encode(), b"2" + client_id.encode()] for client_id in CLIENTS]


def test_messages_can_be_empty_or_larger_than_a_grpc_frame(tls):
    message = torch.arange(3 * MIB, dtype=torch.int32).numpy().tobytes() + b"odd"
    with serve(tls, lambda _, blob: bytes(blob)[::-1]) as server, join(tls, server) as link:
        assert link.exchange(message) == message[::-1]
        assert link.exchange(b"") == b""


def test_too_large_message_is_rejected_and_link_stays_usable(tls):
    with serve(tls, lambda _, blob: bytes(blob) * 2, max_message_bytes=3 * MIB) as server:
        with join(tls, server, max_answer_bytes=4 * MIB) as link:
            with pytest.raises(ValueError, match=f"has {3 * MIB + 1} bytes, but the server accepts at most {3 * MIB}"):
                link.exchange(bytes(3 * MIB + 1))
            assert len(link.exchange(bytes(2 * MIB))) == 4 * MIB
            with pytest.raises(LinkError, match=f"The answer has {6 * MIB} bytes, but at most {4 * MIB}"):
                link.exchange(bytes(3 * MIB))


def test_client_receives_error_text_without_details_and_link_stays_usable(tls, caplog):
    errors = {
        b"value": ValueError("Hidden states of 3 numbers came. Größe 7."),
        b"time": TimeoutError("Client 'south' did not come."),
        b"other": RuntimeError("/home/secret/token"),
        b"long": ValueError("x" * 10**6),
    }

    def answer(client_id: str, message: bytes) -> bytes:
        if message in errors:
            raise errors[message]
        return message

    with serve(tls, answer) as server, join(tls, server) as link:
        with pytest.raises(ValueError, match=r"^Hidden states of 3 numbers came\. Größe 7\.$"):
            link.exchange(b"value")
        with pytest.raises(TimeoutError, match=r"^Client 'south' did not come\.$"):
            link.exchange(b"time")
        with pytest.raises(ServerFailedError, match=r"\(RuntimeError\)") as error:
            link.exchange(b"other")
        assert "secret" not in str(error.value) and "Traceback" not in str(error.value)
        with pytest.raises(ValueError, match="^x{8000}$"):
            link.exchange(b"long")
        assert link.exchange(b"fine") == b"fine"


def test_missing_answer_ends_link_after_answer_timeout(tls):
    release = threading.Event()
    with serve(tls, lambda _, blob: blob if release.wait(10) else b"") as server:
        with join(tls, server, answer_timeout=0.3) as link:
            with pytest.raises(AnswerTimeoutError, match=r"did not answer message 0 within answer_timeout=0\.3 s"):
                link.exchange(b"1")
            release.set()
            # The link stays closed, because it is not known whether the server processed the message.
            with pytest.raises(AnswerTimeoutError, match="resume from a checkpoint"):
                link.exchange(b"2")
            link.close()
            # The client disconnected from the server, so it can connect again at once.
            with join(tls, server) as second_link:
                assert second_link.exchange(b"3") == b"3"


def test_server_shutdown_during_step_keeps_gradients_of_previous_step(tls):
    split = SplitModel.from_model(decoder("llama"), client_id="north")
    body = Body(split)
    with serve(tls, body) as server:
        link = join(tls, server, reconnect_timeout=0.5)
        split.boundary.link = link
        split(**batch("right")).loss.backward()
        before = gradients(split)
        loss = split(**batch("right", seed=1)).loss
        server.close(grace=0)
        with pytest.raises(ServerUnreachableError, match=r"was not active for reconnect_timeout=0\.5 s"):
            loss.backward()
        with pytest.raises(ServerUnreachableError):
            split(**batch("right"))
        link.close()
    after = {name: p.grad for name, p in split.server_body.named_parameters()}
    assert_equal(after, {name: before[f"server_body.{name}"] for name in after})


def test_error_after_server_restart_names_the_restart(tls):
    with serve(tls, lambda _, blob: blob) as first:
        link = join(tls, first)
        link.exchange(b"1")
        address = first.address
    with serve(tls, lambda _, blob: blob, address=address), link:
        with pytest.raises(SessionLostError, match="The server was restarted.*resume from a checkpoint"):
            link.exchange(b"2")


def test_closed_link_raises_error_and_client_can_connect_again(tls):
    left: list[str] = []
    connected: list[str] = []
    with serve(tls, lambda _, blob: blob, on_left=left.append, on_connected=connected.append) as server:
        for _ in range(2):
            with join(tls, server) as link:
                assert server.is_alive("north")
                link.exchange(b"1")
            with pytest.raises(LinkError, match="closed"):
                link.exchange(b"2")
            assert not server.is_alive("north")
            link.close()
    assert connected == left == ["north", "north"]


def test_closing_a_link_ends_its_message(tls):
    arrived, release = threading.Event(), threading.Event()

    def answer(client_id: str, message: bytes) -> bytes:
        arrived.set()
        release.wait(10)
        return message

    with serve(tls, answer) as server, join(tls, server) as link, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(link.exchange, b"1")
        assert arrived.wait(10)
        link.close()
        with pytest.raises(LinkError, match="closed"):
            pending.result(10)
        wait_until(lambda: not server.is_alive("north"))
        release.set()


@pytest.fixture
def interruptible():
    """Let SIGINT raise `KeyboardInterrupt`, which a shell disables for background processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class ReplaceableChannel:
    """
    A channel of gRPC whose later calls and whose end can be replaced.

    Attributes:
        replacement (`Any`): An object whose methods replace the methods of the channel.
    """

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel, self.replacement = channel, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel if self.replacement is None else self.replacement, name)


@pytest.fixture
def channels(monkeypatch) -> list[ReplaceableChannel]:
    """The channels that the links of a test create."""
    created: list[ReplaceableChannel] = []
    create_channel = connection.create_channel

    def create_and_record(*args: Any) -> ReplaceableChannel:
        created.append(ReplaceableChannel(create_channel(*args)))
        return created[-1]

    monkeypatch.setattr(connection, "create_channel", create_and_record)
    return created


@pytest.mark.usefixtures("interruptible")
def test_keyboard_interrupt_ends_the_link(tls, channels):
    release = threading.Event()

    def answer(client_id: str, message: bytes) -> bytes:
        _thread.interrupt_main()
        release.wait(10)
        return message

    with serve(tls, answer) as server, join(tls, server) as link:
        with pytest.raises(KeyboardInterrupt):
            link.exchange(b"1")
        with pytest.raises(LinkError, match=r"Message 0 was interrupted \(KeyboardInterrupt\)"):
            link.exchange(b"2")
        release.set()
        assert len(channels) == 1
    # The link disconnects over a new channel, because the state of the interrupted channel is not known.
    assert len(channels) == 2


class NeverEndingChannel:
    """A channel on which no call ends, not even by its timeout. gRPC can leave such a channel after an interrupt."""

    def unary_unary(self, method):
        return self

    def future(self, request, timeout):
        return self

    def result(self, timeout=None):
        assert timeout is not None, "the call would wait forever"
        time.sleep(min(timeout, 0.2))
        raise grpc.FutureTimeoutError()

    def cancel(self):
        return True

    def close(self):
        pass


@pytest.mark.usefixtures("interruptible")
def test_close_returns_if_an_interrupted_channel_never_closes(tls, channels):
    never, release = threading.Event(), threading.Event()

    class Stuck(NeverEndingChannel):
        def close(self):
            never.wait()

    def answer(client_id: str, message: bytes) -> bytes:
        _thread.interrupt_main()
        release.wait(10)
        return message

    with serve(tls, answer) as server:
        link = join(tls, server)
        with pytest.raises(KeyboardInterrupt):
            link.exchange(b"1")
        release.set()
        channels[0].replacement = Stuck()
        link.close()
        wait_until(lambda: not server.is_alive("north"))
    never.set()
    channels[0].channel.close()


def test_client_leaves_over_a_new_connection_if_grpc_never_ends_a_call(tls, channels):
    with serve(tls, lambda _, blob: blob) as server:
        link = join(tls, server)
        channels[0].channel.close()
        channels[0].replacement = NeverEndingChannel()
        link.close()
        assert len(channels) == 2
        assert not server.is_alive("north")


def test_close_returns_if_grpc_never_ends_any_call(tls, caplog, monkeypatch):
    with serve(tls, lambda _, blob: blob) as server:
        link = join(tls, server, reconnect_timeout=0.6)
        link._connection.channel.close()
        monkeypatch.setattr(connection, "create_channel", lambda *args: NeverEndingChannel())
        link._connection.channel = NeverEndingChannel()
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        link.close()
        assert "could not disconnect" in caplog.text and "did not end the call within its timeout" in caplog.text


def test_message_of_a_handshake_is_limited_before_it_is_read(tls):
    with serve(tls, lambda _, blob: blob) as server, join(tls, server) as link:
        with pytest.raises(LinkError, match="The 'hello' message has 1048577 bytes.*at most 1048576"):
            link.hello(bytes((1 << 20) + 1))


def test_large_announcement_is_refused(tls):
    transport = GrpcTransport("127.0.0.1:0", str(tls))
    transport.start(["north"], SESSION_CONFIG)
    announcement = bytes((8 << 20) + 1)
    with pytest.raises(ValueError, match="announcement of client 'north' has 8388609 bytes, but at most 8388608"):
        GrpcConnection(transport.address, str(tls), "north", SESSION_CONFIG, announcement)
    assert transport.receive(0) is None and not transport.is_connected("north")
    with GrpcConnection(transport.address, str(tls), "north", SESSION_CONFIG, announcement[:100]):
        assert transport.receive(10).blob == announcement[:100]
    transport.stop()


def test_server_that_was_not_started_can_be_closed(tls):
    serve(tls, lambda _, blob: blob).close()


def test_two_servers_cannot_share_a_port(tls):
    with serve(tls, lambda _, blob: blob) as server:
        with pytest.raises(OSError, match="cannot listen on"):
            serve(tls, lambda _, blob: blob, address=server.address)
