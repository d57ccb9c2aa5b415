"""Within one process, messages that are passed and messages that are serialized give the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import batch, decoder

from hf_federated import SplitModel
from hf_federated.messages import base
from hf_federated.split import ClientBatchRunner
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


@pytest.mark.parametrize("wrap", [lambda link: link, BytesOnly], ids=["passed", "serialized"])
def test_clients_of_a_batch_pass_their_messages(wrap):
    clients = {name: SplitModel.from_model(decoder("llama"), client_id=name) for name in ("a", "b")}
    runner = ClientBatchRunner(clients["a"].boundary.link.server)
    for name, client in clients.items():
        client.boundary.link = wrap(runner.link(name))
    inputs = {"a": batch(None, batch_size=2), "b": batch(None, batch_size=3)}
    logits = runner.run({name: lambda name=name: clients[name](**inputs[name]).logits for name in clients})
    for name, values in logits.items():
        assert torch.allclose(values, decoder("llama")(**inputs[name]).logits, atol=1e-6)
    other = SplitModel.from_model(decoder("llama"), client_id="c")
    other.boundary.link = wrap(runner.link("a"))
    with pytest.raises(ValueError, match="The link of client 'a' got a message of client 'c'"):
        other(**inputs["a"])
