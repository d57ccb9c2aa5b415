"""Within one process, messages that are passed and messages that are serialized give the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import batch, decoder

from hf_federated import SplitModel
from hf_federated.messages import base
from hf_federated.split import ClientBatchRunner, LocalLink
from hf_federated.split.messages import Forget
from hf_federated.split.wire import WIRE_DTYPES
from hf_federated.split_training.link_wrappers import ByteCountingLink


class BytesOnly:
    """A link that serializes each message."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.sizes: list[int] = []

    def exchange(self, blob: bytes) -> bytes:
        answer = self.link.exchange(blob)
        self.sizes += [len(blob), len(answer)]
        return answer

    def end_step(self) -> None:
        self.link.end_step()


def results(wrap: Callable[[Any], Any], dtype: str = "float32", **settings: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the link, and the logits and gradients of two micro-batches."""
    model = decoder("llama").train()
    split = SplitModel.from_model(model, wire_dtype=dtype)
    split.boundary.link = wrap(split.boundary.link)
    values = []
    for micro_batch in range(2):
        output = split(**batch("right", batch_size=2 + micro_batch), **settings)
        output.loss.backward()
        values.append(output.logits.detach())
    return split.boundary.link, values + [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_passed_and_serialized_messages_give_the_same_logits_and_gradients(dtype, monkeypatch):
    _, expected = results(BytesOnly, dtype)
    monkeypatch.setattr(base, "pack", pytest.fail)
    _, actual = results(lambda link: link, dtype)
    assert len(actual) == len(expected) > 20
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_passed_messages_are_counted_with_their_serialized_size(dtype):
    sizes: list[int] = []
    serialized, _ = results(BytesOnly, dtype)
    results(lambda link: ByteCountingLink(link, "a", lambda _, sent, received: sizes.extend((sent, received))), dtype)
    assert sizes == serialized.sizes and len(sizes) == 8


def test_callback_gets_the_bytes_of_each_message():
    sizes: list[int] = []
    serialized, expected = results(BytesOnly)

    def watch(link: Any) -> Any:
        link.watch = lambda *blobs: sizes.extend(map(len, blobs))
        return link

    _, actual = results(watch)
    assert sizes == serialized.sizes and all(map(torch.equal, actual, expected))


def results_of_clients(wrap: Callable[[Any], Any], defers_backward: bool) -> list[torch.Tensor]:
    """Return the logits and the gradients of a step that two clients share."""
    model = decoder("llama")
    clients = {name: SplitModel.from_model(model, client_id=name) for name in ("a", "b")}
    runner = ClientBatchRunner(clients["a"].boundary.link.server)
    for name, client in clients.items():
        client.boundary.link = wrap(runner.link(name))
        client.boundary.defers_backward = defers_backward

    def train(name: str) -> torch.Tensor:
        client = clients[name]
        output = client(**batch("right", batch_size=2 if name == "a" else 3))
        output.loss.backward()
        client.boundary.finish_backward()
        return output.logits.detach()

    logits = runner.run({name: lambda name=name: train(name) for name in clients})
    return [*logits.values(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("defers_backward", [True, False])
def test_clients_that_share_a_step_pass_their_messages(defers_backward, monkeypatch):
    serialized: list[BytesOnly] = []

    def serialize(link: Any) -> BytesOnly:
        serialized.append(BytesOnly(link))
        return serialized[-1]

    expected = results_of_clients(serialize, defers_backward)
    monkeypatch.setattr(base, "pack", pytest.fail)
    sizes: dict[str, list[int]] = {"a": [], "b": []}

    def count(link: Any) -> Any:
        return ByteCountingLink(link, link.client_id, lambda name, *pair: sizes[name].extend(pair))

    actual = results_of_clients(count, defers_backward)
    assert len(actual) == len(expected) > 20
    assert all(map(torch.equal, actual, expected))
    assert list(sizes.values()) == [link.sizes for link in serialized] and len(sizes["a"]) == 4


@pytest.mark.parametrize("message", ["Forward", "Forget"])
@pytest.mark.parametrize("wrap", [lambda link: link, BytesOnly], ids=["passed", "serialized"])
def test_link_refuses_the_messages_of_another_client(wrap, message):
    runner = ClientBatchRunner(SplitModel.from_model(decoder("llama")).boundary.link.server)
    other = SplitModel.from_model(decoder("llama"), client_id="c")
    other.boundary.link = wrap(runner.link("a"))
    with pytest.raises(ValueError, match="The link of client 'a' got a message of client 'c'"):
        if message == "Forward":
            other(**batch(None))
        else:
            other.boundary.link.exchange(Forget("c", 0).to_bytes())


class LoggingLink(LocalLink):
    """A link of a user that replaces `exchange`."""

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.num_messages = 0

    def exchange(self, blob: bytes) -> bytes:
        self.num_messages += 1
        return super().exchange(blob)


class Proxy:
    """A link that forwards unknown attributes to another link."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.num_messages = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    def exchange(self, blob: bytes) -> bytes:
        self.num_messages += 1
        return self.link.exchange(blob)


def replaced(link: Any) -> Any:
    link.num_messages, exchange = 0, link.exchange

    def count(blob: bytes) -> bytes:
        link.num_messages += 1
        return exchange(blob)

    link.exchange = count
    return link


@pytest.mark.parametrize("wrap", [lambda link: LoggingLink(link.server), Proxy, replaced])
def test_a_method_that_replaces_exchange_gets_every_message(wrap):
    link, _ = results(wrap)
    assert link.num_messages == 4


def test_a_link_of_a_batch_that_replaces_exchange_gets_every_message():
    split = SplitModel.from_model(decoder("llama"))
    split.boundary.link = replaced(ClientBatchRunner(split.boundary.link.server).link("client"))
    split(**batch(None)).loss.backward()
    assert split.boundary.link.num_messages == 2
