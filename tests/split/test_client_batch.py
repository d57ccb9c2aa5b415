"""A server step for several clients is equal to one step over the joined batches of the clients."""

from __future__ import annotations

import threading

import pytest
import torch
from decoders import VOCABULARY, decoder
from torch import nn

from hf_federated import SplitModel
from hf_federated.adapters.copying import copy_model
from hf_federated.split import ClientBatchRunner


def create_clients(name: str, num_clients: int) -> tuple[nn.Module, dict[str, SplitModel], ClientBatchRunner]:
    """Create a full model, and split models with separate heads and tails that share one body."""
    full_model = decoder(name)
    first = SplitModel.from_model(copy_model(decoder(name)), client_id="0")
    clients = {"0": first}
    for number in range(1, num_clients):
        client = SplitModel.from_model(decoder(name), client_id=str(number))
        client.server_body = None
        clients[str(number)] = client
    runner = ClientBatchRunner(first.boundary.link.server)
    for client_id, client in clients.items():
        client.boundary.link = runner.link(client_id)
    return full_model, clients, runner


def client_inputs(client: int, padding: str | None) -> dict[str, torch.Tensor]:
    """Create a batch whose number and length of sequences differ between clients."""
    generator = torch.Generator().manual_seed(client)
    batch_size, length = 1 + client % 3, 6 + client
    ids = torch.randint(3, VOCABULARY, (batch_size, length), generator=generator)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if padding == "packed":
        # Every second client packs two sequences per row. With a cache, the second could attend to the first.
        inputs["use_cache"] = False
        if client % 2:
            inputs["position_ids"] = torch.cat((torch.arange(4), torch.arange(length - 4))).expand(batch_size, -1)
            inputs["labels"][:, 4] = -100
    elif padding is not None and client % 2:
        mask = torch.ones_like(ids)
        mask[0, slice(0, 2) if padding == "left" else slice(length - 2, length)] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][mask == 0] = -100
        if padding == "left":
            inputs["labels"][0, 2] = -100
    return inputs


def count_targets(inputs: dict[str, torch.Tensor], name: str = "llama") -> int:
    # GPT-2 has no loss type, so `Trainer` counts all labels.
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
@pytest.mark.sampled(12)
def test_server_step_equals_one_step_over_all_clients_batches(name, padding, num_clients):
    full_model, clients, runner = create_clients(name, num_clients)
    inputs = {client_id: client_inputs(int(client_id), padding) for client_id in clients}
    counts = {client_id: count_targets(batch, name) for client_id, batch in inputs.items()}

    def step(client_id: str) -> float:
        client = clients[client_id]
        client.boundary.begin_step(0, total_targets=counts[client_id])
        # Test both kinds of backward pass.
        client.boundary.defers_backward = num_clients in (2, 8)
        loss = client(**inputs[client_id]).loss
        loss.backward()
        client.boundary.finish_backward()
        return loss.item()

    losses = runner.run({client_id: lambda name=client_id: step(name) for client_id in clients})
    server = runner.server
    assert server.num_targets == sum(counts.values())
    server.average_gradients()

    # Body: the mean over the target tokens of all clients, computed with the full model.
    total = sum(counts.values())
    sum(full_model(**inputs[client_id]).loss * counts[client_id] / total for client_id in clients).backward()
    expected = {name: p.grad for name, p in full_model.named_parameters(remove_duplicate=False)}
    for parameter_name, parameter in server.body.named_original_parameters():
        assert (parameter.grad - expected[parameter_name]).abs().max() <= 1e-6, parameter_name
    # Head and tail: the mean over the target tokens of one client.
    for client_id, client in clients.items():
        full_model.zero_grad()
        loss = full_model(**inputs[client_id]).loss
        loss.backward()
        assert abs(losses[client_id] - loss.item()) <= 1e-6
        expected = {name: p.grad for name, p in full_model.named_parameters(remove_duplicate=False)}
        for part in (client.client_head, client.client_tail):
            for parameter_name, parameter in part.named_original_parameters():
                if parameter.grad is not None:
                    assert (parameter.grad - expected[parameter_name]).abs().max() <= 1e-6, parameter_name


def test_client_without_backward_pass_does_not_contribute_to_server_gradients():
    full_model, clients, runner = create_clients("llama", 3)
    inputs = {client_id: client_inputs(int(client_id), None) for client_id in clients}
    counts = {client_id: count_targets(batch) for client_id, batch in inputs.items()}
    server = runner.server

    def step(client_id: str) -> None:
        clients[client_id].boundary.begin_step(0, total_targets=counts[client_id])
        loss = clients[client_id](**inputs[client_id]).loss
        if client_id != "1":
            loss.backward()

    runner.run({client_id: lambda name=client_id: step(name) for client_id in clients})
    server.average_gradients()
    contributing = ["0", "2"]
    total = sum(counts[client_id] for client_id in contributing)
    sum(full_model(**inputs[client_id]).loss * counts[client_id] / total for client_id in contributing).backward()
    expected = {name: p.grad for name, p in full_model.named_parameters(remove_duplicate=False)}
    for parameter_name, parameter in server.body.named_original_parameters():
        assert (parameter.grad - expected[parameter_name]).abs().max() <= 1e-6, parameter_name


def test_each_client_has_its_own_random_state():
    results = []
    for _attempt in range(2):
        _, clients, runner = create_clients("llama", 3)
        torch.manual_seed(5)

        def work(client_id: str, clients: dict[str, SplitModel] = clients) -> list[float]:
            torch.manual_seed(int(client_id))
            numbers = [torch.rand(()).item()]
            with torch.no_grad():
                clients[client_id](**client_inputs(int(client_id), None))
            return [*numbers, torch.rand(()).item()]

        results.append(runner.run({client_id: lambda name=client_id: work(name) for client_id in clients}))
        after = torch.rand(()).item()
        torch.manual_seed(5)
        assert after == torch.rand(()).item()
    assert results[0] == results[1]
    for client_id, numbers in results[0].items():
        torch.manual_seed(int(client_id))
        assert numbers == [torch.rand(()).item(), torch.rand(()).item()]


@pytest.mark.parametrize("failure_point", ["start", "between", "end"])
@pytest.mark.parametrize("failing", ["0", "1", "2"])
def test_failing_client_ends_the_step_for_all_clients(failing, failure_point):
    _, clients, runner = create_clients("llama", 3)
    finished = []

    def work(client_id: str) -> None:
        fails = client_id == failing
        inputs = client_inputs(int(client_id), None)
        clients[client_id].boundary.begin_step(0, total_targets=count_targets(inputs))
        if fails and failure_point == "start":
            raise ValueError("no examples")
        loss = clients[client_id](**inputs).loss
        if fails and failure_point == "between":
            raise ValueError("no examples")
        loss.backward()
        if fails:
            raise ValueError("no examples")
        finished.append(client_id)

    with pytest.raises(ValueError, match="no examples"):
        runner.run({client_id: lambda name=client_id: work(name) for client_id in clients})
    assert failing not in finished
    if failure_point != "end":
        assert not finished
    assert runner.server.num_targets == 0 and not runner.server.graphs
    # The next step works.
    outputs = runner.run(
        {
            client_id: lambda name=client_id: clients[name](**client_inputs(int(name), None)).loss
            for client_id in clients
        }
    )
    assert set(outputs) == set(clients)


def test_run_without_clients_or_during_another_run_raises_error():
    _, clients, runner = create_clients("llama", 2)
    for work in ({}, {"0": lambda: runner.run({"1": lambda: None})}):
        with pytest.raises(RuntimeError, match="only one run at a time"):
            runner.run(work)
    assert runner.run({"0": lambda: 3}) == {"0": 3}


def test_cache_can_be_dropped_during_another_clients_turn():
    _, clients, runner = create_clients("llama", 2)
    with torch.no_grad():
        caches = {
            client_id: clients[client_id](client_inputs(0, None)["input_ids"], use_cache=True).past_key_values
            for client_id in clients
        }

    def work(client_id: str) -> float:
        caches.pop("0" if client_id == "1" else "1", None)
        return clients[client_id](**client_inputs(int(client_id), None)).loss.item()

    runner.run({client_id: lambda name=client_id: work(name) for client_id in clients})
    assert not caches and len(runner.server.caches) < 2  # each cache is dropped with the next call of its client
    for client_id in clients:
        clients[client_id].boundary.flush()
    assert not runner.server.caches


def test_message_with_another_clients_id_raises_error():
    _, clients, runner = create_clients("llama", 2)
    clients["1"].boundary.client_id = "0"
    with pytest.raises(ValueError, match="client '1' got a message of client '0'"):
        clients["1"](**client_inputs(1, None))


def test_backward_pass_in_another_thread_raises_error_instead_of_deadlock():
    _, clients, runner = create_clients("llama", 2)

    def work(client_id: str) -> None:
        loss = clients[client_id](**client_inputs(int(client_id), None)).loss
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

    with pytest.raises(RuntimeError, match="Set boundary.defers_backward"):
        runner.run({client_id: lambda name=client_id: work(name) for client_id in clients})


def test_packed_and_padded_clients_in_one_server_step_raise_error():
    _, clients, runner = create_clients("llama", 2)
    ids = torch.full((1, 8), 5)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    work = {"0": lambda: clients["0"](ids, position_ids=packed), "1": lambda: clients["1"](ids, attention_mask=mask)}
    with pytest.raises(ValueError, match="Enable packing for all clients, or for no client"):
        runner.run(work)


def test_server_error_reaches_every_client():
    _, clients, runner = create_clients("llama", 2)
    clients["1"].eval()
    clients["0"].train()
    with pytest.raises(ValueError, match="training is True for client '0' and False for client '1'"):
        runner.run(
            {
                client_id: lambda name=client_id: clients[name](**client_inputs(int(name), None))
                for client_id in clients
            }
        )


def test_client_outside_of_a_run_is_answered_immediately():
    full_model, clients, _ = create_clients("llama", 2)
    inputs = client_inputs(1, None)
    assert torch.equal(clients["1"](**inputs).logits, full_model(**inputs).logits)
