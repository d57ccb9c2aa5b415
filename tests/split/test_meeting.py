"""Clients that share a server's step: it is one step over their rows together."""

from __future__ import annotations

import pytest
import torch
from decoders import VOCABULARY, decoder
from torch import nn

from hf_federated import SplitModel
from hf_federated.adapters.copying import copy_model
from hf_federated.split import Meeting


def clients_of(name: str, num_clients: int) -> tuple[nn.Module, dict[str, SplitModel], Meeting]:
    """A whole model, and split ones with heads and tails of their own before one body."""
    whole = decoder(name)
    first = SplitModel.from_model(copy_model(decoder(name)), client_id="0")
    clients = {"0": first}
    for number in range(1, num_clients):
        client = SplitModel.from_model(decoder(name), client_id=str(number))
        client.server_body = None
        clients[str(number)] = client
    meeting = Meeting(first.boundary.link.server)
    for client_id, client in clients.items():
        client.boundary.link = meeting.link(client_id)
    return whole, clients, meeting


def rows_of(client: int, padding: str | None) -> dict[str, torch.Tensor]:
    """Rows of another number and length for each client."""
    generator = torch.Generator().manual_seed(client)
    rows, length = 1 + client % 3, 6 + client
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if padding is not None and client % 2:
        mask = torch.ones_like(ids)
        mask[0, slice(0, 2) if padding == "left" else slice(length - 2, length)] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][mask == 0] = -100
        if padding == "left":
            inputs["labels"][0, 2] = -100
    return inputs


def num_targets(inputs: dict[str, torch.Tensor]) -> int:
    return int((inputs["labels"][:, 1:] != -100).sum())


@pytest.mark.parametrize("num_clients", [1, 2, 4, 8])
@pytest.mark.parametrize(("name", "padding"), [("llama", None), ("llama", "left"), ("opt", "right"), ("gpt2", "left")])
def test_a_servers_step_is_one_over_the_rows_of_all_clients(name, padding, num_clients):
    whole, clients, meeting = clients_of(name, num_clients)
    inputs = {client_id: rows_of(int(client_id), padding) for client_id in clients}
    counts = {client_id: num_targets(own) for client_id, own in inputs.items()}

    def step(client_id: str) -> float:
        client = clients[client_id]
        client.boundary.begin_step(0, total_targets=counts[client_id])
        loss = client(**inputs[client_id]).loss
        loss.backward()
        return loss.item()

    losses = meeting.run({client_id: lambda own=client_id: step(own) for client_id in clients})
    server = meeting.server
    assert server.num_targets == sum(counts.values())
    server.average_gradients()

    # The body: the mean over all target tokens, of the whole model on each client's rows.
    total = sum(counts.values())
    sum(whole(**inputs[own]).loss * counts[own] / total for own in clients).backward()
    expected = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    for parameter, own in server.body.originals():
        assert (own.grad - expected[parameter]).abs().max() <= 1e-6, parameter
    # Head and tail: each client's own mean.
    for client_id, client in clients.items():
        whole.zero_grad()
        loss = whole(**inputs[client_id]).loss
        loss.backward()
        assert abs(losses[client_id] - loss.item()) <= 1e-6
        alone = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
        for part in (client.client_head, client.client_tail):
            for parameter, own in part.originals():
                if own.grad is not None:
                    assert (own.grad - alone[parameter]).abs().max() <= 1e-6, parameter


def test_a_client_whose_gradient_does_not_come_is_left_out():
    whole, clients, meeting = clients_of("llama", 3)
    inputs = {client_id: rows_of(int(client_id), None) for client_id in clients}
    counts = {client_id: num_targets(own) for client_id, own in inputs.items()}
    server = meeting.server

    class Silent:
        """A link whose client falls silent on the way back."""

        def exchange(self, blob: bytes) -> bytes:
            return link.exchange(blob)

    link = clients["1"].boundary.link
    clients["1"].boundary.link = Silent()

    def step(client_id: str) -> None:
        clients[client_id].boundary.begin_step(0, total_targets=counts[client_id])
        loss = clients[client_id](**inputs[client_id]).loss
        if client_id != "1":
            loss.backward()

    meeting.run({client_id: lambda own=client_id: step(own) for client_id in clients})
    server.average_gradients()
    arrived = ["0", "2"]
    total = sum(counts[own] for own in arrived)
    sum(whole(**inputs[own]).loss * counts[own] / total for own in arrived).backward()
    expected = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    for parameter, own in server.body.originals():
        assert (own.grad - expected[parameter]).abs().max() <= 1e-6, parameter


def test_each_client_draws_its_own_random_numbers_in_the_same_order():
    drawn = []
    for _attempt in range(2):
        _, clients, meeting = clients_of("llama", 3)
        torch.manual_seed(5)

        def work(client_id: str, clients: dict[str, SplitModel] = clients) -> list[float]:
            torch.manual_seed(int(client_id))
            numbers = [torch.rand(()).item()]
            with torch.no_grad():
                clients[client_id](**rows_of(int(client_id), None))
            return [*numbers, torch.rand(()).item()]

        drawn.append(meeting.run({client_id: lambda own=client_id: work(own) for client_id in clients}))
        after = torch.rand(()).item()
        torch.manual_seed(5)
        assert after == torch.rand(()).item()
    assert drawn[0] == drawn[1]
    for client_id, numbers in drawn[0].items():
        torch.manual_seed(int(client_id))
        assert numbers == [torch.rand(()).item(), torch.rand(()).item()]


def test_a_client_that_fails_ends_the_step_for_all():
    _, clients, meeting = clients_of("llama", 3)

    def work(client_id: str) -> None:
        if client_id == "1":
            raise ValueError("no rows")
        clients[client_id](**rows_of(int(client_id), None))

    with pytest.raises(ValueError, match="no rows"):
        meeting.run({client_id: lambda own=client_id: work(own) for client_id in clients})
    # The next step is not troubled by it.
    outputs = meeting.run({own: lambda own=own: clients[own](**rows_of(int(own), None)).loss for own in clients})
    assert set(outputs) == set(clients)


def test_what_the_server_refuses_reaches_every_client():
    _, clients, meeting = clients_of("llama", 2)
    clients["1"].eval()
    clients["0"].train()
    with pytest.raises(ValueError, match="training is True of '0' and False of '1'"):
        meeting.run({own: lambda own=own: clients[own](**rows_of(int(own), None)) for own in clients})


def test_a_client_alone_is_answered_as_by_its_server():
    whole, clients, _ = clients_of("llama", 2)
    inputs = rows_of(1, None)
    assert torch.equal(clients["1"](**inputs).logits, whole(**inputs).logits)
