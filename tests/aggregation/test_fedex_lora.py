"""FedEx-LoRA: the base weights take the difference to the mean of the products, and all clients get it."""

from __future__ import annotations

import copy

import pytest
import torch
from lora_federations import METHODS, TEN, client_part, lora_model, many_layers, run_round, train, trained, weights_of
from peft import LoraConfig, PeftModel, get_peft_model
from robust_reference import as_update
from tiny import rows, same_weights
from torch import nn
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from hf_federated import FedExLoRA, Round, StackedLora
from hf_federated.adapters import Exchange
from hf_federated.aggregation.base_changes import CHANGES, LEFT
from hf_federated.engines import LocalEngine
from hf_federated.utils.lora_modules import find_lora_modules


@pytest.mark.parametrize("method", [FedExLoRA(), StackedLora(reset=True)], ids=lambda method: method.name)
@pytest.mark.parametrize("num_clients", [1, 2, 5])
@pytest.mark.parametrize("is_tied", [False, True], ids=["base weights", "residual adapter"])
def test_weights_of_the_model_are_the_mean_of_the_weights_of_the_clients(method, num_clients, is_tied):
    """The weights of PEFT are the oracle, also for layers with a transposed weight and layers that are not square."""
    model = many_layers(is_tied=is_tied)
    exchange = Exchange(model, with_base=True)
    assert (exchange.residual is None) != is_tied
    method.check_model(model, {})
    method.setup(3, num_clients)
    for number in range(4 if is_tied else 2):
        clients = {f"client {each}": trained(model, 10 * number + each) for each in range(num_clients)}
        examples = {client_id: 1 + each for each, client_id in enumerate(clients)}
        expected = {}
        for client_id, client in clients.items():
            for name, value in weights_of(client).items():
                expected[name] = expected.get(name, 0) + examples[client_id] / sum(examples.values()) * value
        run_round(method, exchange, clients, examples)
        for name, value in weights_of(model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_a_new_adapter_has_the_product_zero_and_other_values_in_each_round():
    model, method = many_layers(), StackedLora(reset=True)
    method.check_model(model, {})
    exchange, found = Exchange(model, with_base=True), []
    for number in range(2):
        run_round(method, exchange, {"a": trained(model, number), "b": trained(model, 9)}, {"a": 1, "b": 2}, number)
        assert all(not module.layer.get_delta_weight("default").any() for module in find_lora_modules(model).values())
        found.append(exchange.read())
    different = [name for name in found[0] if "lora_A" in name and not torch.equal(found[0][name], found[1][name])]
    assert len(different) == 4


# ---- Messages


def sent_values(state, base):
    return sum(value.numel() for name, value in state.items() if name.startswith(tuple(base)))


def test_clients_get_the_changes_since_their_last_round_until_the_weights_are_smaller():
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(60, 50)).double(), LoraConfig(r=1, target_modules=["0"]))
    method = FedExLoRA()
    method.check_model(model, {})
    method.setup(40, 3)
    exchange = Exchange(model, with_base=True)
    (base,) = method.base_names
    sizes = []
    for number in range(30):
        state = exchange.read()
        sent = method.state_for("absent", state)
        sizes.append(sent_values(sent, [base]))
        assert sent_values(method.state_for("present", state), [base]) == (0 if number == 0 else 110)
        run_round(
            method,
            exchange,
            {name: trained(model, number) for name in ("present", "other")},
            {"present": 1, "other": 2},
        )
    # A change has 50 + 60 values, and the weight has 3000.
    assert sizes == [110 * number if 110 * number < 3000 else 3000 for number in range(30)]


def test_a_client_without_a_reply_gets_all_changes_again():
    model, method = many_layers(), FedExLoRA()
    method.check_model(model, {})
    exchange = Exchange(model, with_base=True)
    run_round(method, exchange, {"a": trained(model, 0), "b": trained(model, 1)}, {"a": 1, "b": 1})
    state = exchange.read()
    assert CHANGES in method.state_for("a", state)
    kept = method.state_dict()
    method.load_state_dict({**kept, "versions": {**kept["versions"], "a": 1}})
    assert CHANGES not in method.state_for("a", state)
    accumulator = method.accumulator(state)
    for client_id in ("b", "c"):
        adapter = {name: value for name, value in Exchange(trained(model, 2)).read().items() if "lora_" in name}
        accumulator.add(method.whole_update(as_update(client_id, adapter, 1), state))
    exchange.write(method.finish(Round(1, ("a", "b", "c"), state, sums=accumulator)))
    sent = method.state_for("a", exchange.read())
    assert CHANGES not in sent or sent[CHANGES][0] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state | {CHANGES: torch.tensor([1, 1])}, "changes 1 to 2 .* weights after change 0"),
        (lambda state: state | {CHANGES: torch.tensor([0, 1, 1])}, "changes 0 to 2"),
        (lambda state: state | {CHANGES: torch.tensor([0, 0])}, r"the ranks \[0\] of the changes"),
        (lambda state: state | {CHANGES: torch.tensor([0, -1])}, r"the ranks \[-1\] of the changes"),
        (lambda state: {name: value for name, value in state.items() if name != CHANGES}, CHANGES),
        (lambda state: {name: value for name, value in state.items() if not name.endswith(LEFT)}, LEFT),
    ],
)
def test_a_client_refuses_changes_that_do_not_follow_its_weights(change, message):
    model, method = many_layers(), FedExLoRA()
    method.check_model(model, {})
    exchange = Exchange(model, with_base=True)
    run_round(method, exchange, {"a": trained(model, 0), "b": trained(model, 1)}, {"a": 1, "b": 1})

    part = client_part(method, exchange, model, {}, 1)
    with pytest.raises((ValueError, KeyError), match=message):
        part.place(change(method.state_for("c", exchange.read())))


def test_a_client_adds_only_the_changes_that_its_weights_lack():
    """The server sends all changes to a client that did not reply, but the client may have trained."""
    model, method = many_layers(rank=1), FedExLoRA()
    method.check_model(model, {})
    exchange, memory = Exchange(copy.deepcopy(model), with_base=True), {}
    server = Exchange(model, with_base=True)
    for number in range(3):
        state = server.read()
        part = client_part(method, exchange, model, memory, number)
        placed = part.place(method.state_for("c", state))
        assert all(torch.equal(placed[name], state[name]) for name in method.base_names)
        assert memory.get("version", 0) == number
        run_round(method, server, {"a": trained(model, number), "b": trained(model, 9)}, {"a": 1, "b": 2})


# ---- Federations


methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@methods
def test_all_clients_start_from_the_logits_of_the_server(tmp_path, method):
    """Ten clients, of which two train in a round, so that most clients miss several changes."""
    _, logits = train(tmp_path, method)
    assert len(logits.server) == 6 and all(len(clients) == 2 for clients in logits.clients)
    for server, clients in zip(logits.server, logits.clients, strict=True):
        assert all(torch.equal(client, server) for client in clients)
    assert not torch.equal(logits.server[0], logits.server[-1])


@methods
def test_the_saved_model_is_the_global_model(tmp_path, method):
    trainer, logits = train(tmp_path, method, num_rounds=3)
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert type(loaded) is BertForSequenceClassification and not (tmp_path / "saved" / "adapter_config.json").exists()
    merged = copy.deepcopy(trainer.model).merge_and_unload()
    assert torch.equal(logits.read(loaded), logits.read(merged))
    torch.testing.assert_close(logits.read(loaded), logits.read(trainer.model), rtol=0, atol=1e-6)
    assert isinstance(trainer.model, PeftModel)
    # The adapter alone would be another model.
    plain = lora_model()
    plain.load_state_dict(
        {**plain.state_dict(), **{name: value for name, value in trainer.exchange.read().items() if "lora" in name}}
    )
    assert not torch.allclose(logits.read(plain), logits.read(trainer.model), rtol=0, atol=1e-5)
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "library_name: transformers" in card


@methods
def test_serialized_messages_change_no_byte(tmp_path, method):
    options = {"num_rounds": 3, "clients": dict(list(TEN.items())[:4])}
    plain, _ = train(tmp_path / "plain", method, **options)
    serialized, _ = train(tmp_path / "serialized", method, engine=LocalEngine(serialize=True), **options)
    assert same_weights(plain.model, serialized.model)


def test_clients_send_no_base_weights(tmp_path):
    trainer, _ = train(tmp_path / "fedex", METHODS["fedex_lora"], num_rounds=3)
    fedit, _ = train(tmp_path / "fedit", {"aggregation": "fedit"}, num_rounds=3)
    assert trainer.exchange.num_values == fedit.exchange.num_values
    for found, expected in zip(trainer.ledger.rounds(), fedit.ledger.rounds(), strict=True):
        assert found["bytes_up"] == expected["bytes_up"]
        assert found["bytes_down"] >= expected["bytes_down"]
    assert trainer.ledger.bytes_down > fedit.ledger.bytes_down


def test_one_client_gives_the_bytes_of_fedit(tmp_path):
    clients = {"north": rows(8)}
    fedex, _ = train(tmp_path / "fedex", {**METHODS["fedex_lora"], "clients_per_round": 1}, 2, clients)
    fedit, _ = train(tmp_path / "fedit", {"aggregation": "fedit", "clients_per_round": 1}, 2, clients)
    assert same_weights(fedex.model, fedit.model)


def test_rank_and_energy_are_refused_with_reset():
    with pytest.raises(ValueError, match="no effect with reset=True"):
        StackedLora(energy=0.9, reset=True)
