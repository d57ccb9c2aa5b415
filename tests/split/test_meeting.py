"""Clients that share a server's step: it is one step over their rows together."""

from __future__ import annotations

import threading

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
    if padding == "packed":
        # Of every other client each row is two sequences; a cache would let the second see the first.
        inputs["use_cache"] = False
        if client % 2:
            inputs["position_ids"] = torch.cat((torch.arange(4), torch.arange(length - 4))).expand(rows, -1)
            inputs["labels"][:, 4] = -100
    elif padding is not None and client % 2:
        mask = torch.ones_like(ids)
        mask[0, slice(0, 2) if padding == "left" else slice(length - 2, length)] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][mask == 0] = -100
        if padding == "left":
            inputs["labels"][0, 2] = -100
    return inputs


def num_targets(inputs: dict[str, torch.Tensor], name: str = "llama") -> int:
    # GPT-2 names no loss, and Trainer counts all its labels.
    return int((inputs["labels"][:, name != "gpt2" :] != -100).sum())


@pytest.mark.parametrize("num_clients", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("llama", None),
        ("llama", "left"),
        ("opt", "right"),
        ("gpt2", "left"),
        ("llama", "packed"),
        ("mistral-window", "packed"),
        ("gpt2", "packed"),
    ],
)
def test_a_servers_step_is_one_over_the_rows_of_all_clients(name, padding, num_clients):
    whole, clients, meeting = clients_of(name, num_clients)
    inputs = {client_id: rows_of(int(client_id), padding) for client_id in clients}
    counts = {client_id: num_targets(own, name) for client_id, own in inputs.items()}

    def step(client_id: str) -> float:
        client = clients[client_id]
        client.boundary.begin_step(0, total_targets=counts[client_id])
        # Either way of going back.
        client.boundary.defers_backward = num_clients in (2, 8)
        loss = client(**inputs[client_id]).loss
        loss.backward()
        client.boundary.finish_backward()
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


@pytest.mark.parametrize("place", ["start", "between", "end"])
@pytest.mark.parametrize("failing", ["0", "1", "2"])
def test_a_client_that_fails_ends_the_step_for_all(failing, place):
    _, clients, meeting = clients_of("llama", 3)
    finished = []

    def work(client_id: str) -> None:
        fails = client_id == failing
        inputs = rows_of(int(client_id), None)
        clients[client_id].boundary.begin_step(0, total_targets=num_targets(inputs))
        if fails and place == "start":
            raise ValueError("no rows")
        loss = clients[client_id](**inputs).loss
        if fails and place == "between":
            raise ValueError("no rows")
        loss.backward()
        if fails:
            raise ValueError("no rows")
        finished.append(client_id)

    with pytest.raises(ValueError, match="no rows"):
        meeting.run({client_id: lambda own=client_id: work(own) for client_id in clients})
    assert failing not in finished
    if place != "end":
        assert not finished
    assert meeting.server.num_targets == 0 and not meeting.server._graphs
    # The next step is not troubled by it.
    outputs = meeting.run({own: lambda own=own: clients[own](**rows_of(int(own), None)).loss for own in clients})
    assert set(outputs) == set(clients)


def test_there_is_one_meeting_at_a_time_and_it_needs_clients():
    _, clients, meeting = clients_of("llama", 2)
    for work in ({}, {"0": lambda: meeting.run({"1": lambda: None})}):
        with pytest.raises(RuntimeError, match="one at a time"):
            meeting.run(work)
    assert meeting.run({"0": lambda: 3}) == {"0": 3}


def test_a_cache_may_be_forgotten_in_another_clients_turn():
    _, clients, meeting = clients_of("llama", 2)
    with torch.no_grad():
        caches = {own: clients[own](rows_of(0, None)["input_ids"], use_cache=True).past_key_values for own in clients}

    def work(client_id: str) -> float:
        caches.pop("0" if client_id == "1" else "1", None)
        return clients[client_id](**rows_of(int(client_id), None)).loss.item()

    meeting.run({own: lambda own=own: work(own) for own in clients})
    assert not caches and len(meeting.server._caches) < 2  # each is told before its client's next passage
    for own in clients:
        clients[own].boundary.flush()
    assert not meeting.server._caches


def test_a_client_speaks_in_its_own_name():
    _, clients, meeting = clients_of("llama", 2)
    clients["1"].boundary.client_id = "0"
    with pytest.raises(ValueError, match="in the name of '0'"):
        clients["1"](**rows_of(1, None))


def test_a_gradient_from_another_thread_is_an_error_and_no_deadlock():
    _, clients, meeting = clients_of("llama", 2)

    def work(client_id: str) -> None:
        loss = clients[client_id](**rows_of(int(client_id), None)).loss
        errors: list[BaseException] = []

        def backward() -> None:
            try:
                loss.backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        raise errors[0]

    with pytest.raises(RuntimeError, match="set boundary.defers_backward"):
        meeting.run({own: lambda own=own: work(own) for own in clients})


def test_packed_rows_beside_masked_ones_are_refused():
    _, clients, meeting = clients_of("llama", 2)
    ids = torch.full((1, 8), 5)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    work = {"0": lambda: clients["0"](ids, position_ids=packed), "1": lambda: clients["1"](ids, attention_mask=mask)}
    with pytest.raises(ValueError, match="let all clients pack their rows, or none"):
        meeting.run(work)


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
