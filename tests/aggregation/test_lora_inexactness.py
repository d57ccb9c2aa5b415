"""The logged inexactness of averaged LoRA factors equals a computation with full matrices."""

from __future__ import annotations

import statistics

import pytest
import torch
from federations import build_federation
from lora_states import BEFORE, A, B, client_states
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from hf_federated import FederatedCallback
from hf_federated.aggregation.lora_factors import find_pairs
from hf_federated.aggregation.lora_inexactness import MAXIMUM, MEDIAN, inexactness, product_norm
from hf_federated.cards import render_model_card
from hf_federated.methods import UpdateCollection


def dense_inexactness(before, states, weights) -> float:
    """The definition, with matrices of the size of the module."""
    total = sum(weights.values())
    mean = {name: sum(weights[key] / total * states[key][name].double() for key in states) for name in (A, B)}
    ideal = sum(weights[key] / total * states[key][B].double() @ states[key][A].double() for key in states)
    change = ideal - before[B].double() @ before[A].double()
    return float((mean[B] @ mean[A] - ideal).norm() / change.norm())


@pytest.mark.parametrize("num_clients", [2, 3, 7])
def test_inexactness_equals_the_definition(num_clients):
    """Up to two clients, the stacked factors are smaller than the module."""
    states, updates = client_states(num_clients), UpdateCollection(BEFORE)
    weights = {name: 1.0 + number for number, name in enumerate(states)}
    for name, state in states.items():
        updates.add(name, state, weights[name])
    found = inexactness(updates, find_pairs(BEFORE)[0])
    assert found == pytest.approx(dense_inexactness(BEFORE, states, weights), rel=1e-12)
    assert found > 0.01


def test_one_client_is_exact():
    updates = UpdateCollection(BEFORE)
    updates.add("north", client_states(1)["client 0"], 3.0)
    assert inexactness(updates, find_pairs(BEFORE)[0]) == 0.0


@pytest.mark.parametrize("num_clients", [2, 7])
def test_clients_that_change_nothing_are_exact(num_clients):
    updates = UpdateCollection(BEFORE)
    for number in range(num_clients):
        updates.add(f"client {number}", BEFORE, 1.0 + number)
    assert inexactness(updates, find_pairs(BEFORE)[0]) == 0.0


def test_norm_of_a_product_equals_the_norm_of_the_matrix():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((9, 3), (3, 5)))
    assert product_norm(left, right) == pytest.approx(float((left @ right).norm()), rel=1e-12)


class Updates(FederatedCallback):
    """Keeps the global state before a round and the updates of the round."""

    def __init__(self) -> None:
        self.rounds = []

    def on_round_begin(self, args, state, control, round, **kwargs):
        self.rounds.append(({name: value.clone() for name, value in round.state.items()}, {}, {}))

    def on_client_end(self, args, state, control, update, **kwargs):
        _, states, weights = self.rounds[-1]
        states[update.client_id] = {name: value.clone() for name, value in update.state.items()}
        weights[update.client_id] = update.num_examples


def lora_model():
    return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


def train(directory, model, **federation):
    updates = Updates()
    trainer = build_federation(directory, federation=federation, trainer={"model": model, "callbacks": [updates]})
    trainer.train()
    return trainer, updates


@pytest.mark.parametrize("aggregation", ["fedavg", "median"])
def test_every_method_logs_the_inexactness_of_its_updates(tmp_path, aggregation):
    trainer, updates = train(tmp_path, lora_model(), aggregation=aggregation)
    logged = [entry for entry in trainer.state.log_history if MEDIAN in entry]
    assert len(logged) == len(updates.rounds) == 2
    for entry, (before, states, weights) in zip(logged, updates.rounds, strict=True):
        values = []
        for pair in find_pairs(before):
            renamed = {key: {A: state[pair.a], B: state[pair.b]} for key, state in states.items()}
            start = {A: before[pair.a], B: before[pair.b]}
            uniform = weights if aggregation == "fedavg" else dict.fromkeys(weights, 1)
            values.append(dense_inexactness(start, renamed, uniform))
        assert entry[MEDIAN] == pytest.approx(statistics.median(values), rel=1e-6)
        assert entry[MAXIMUM] == pytest.approx(max(values), rel=1e-6)


@pytest.mark.parametrize("adapter", ["none", "frozen factor"])
def test_nothing_is_logged_without_two_exchanged_factors(tmp_path, adapter):
    model = tiny_model() if adapter == "none" else lora_model()
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    trainer, _ = train(tmp_path, model)
    assert not any("lora" in name for entry in trainer.state.log_history for name in entry)
    assert "LoRA factors" not in str(render_model_card(trainer))


def test_secure_aggregation_logs_no_inexactness(tmp_path):
    """The server knows the factors of no single client."""
    secure = {"max_weight": 8, "min_survivors": 2, "pins": "none"}
    trainer, _ = train(tmp_path, lora_model(), secure_aggregation="secagg", secure_aggregation_kwargs=secure)
    assert not any(MEDIAN in entry for entry in trainer.state.log_history)


def test_the_card_states_the_inexactness_of_the_run(tmp_path):
    trainer, _ = train(tmp_path, lora_model())
    logged = [entry for entry in trainer.state.log_history if MEDIAN in entry]
    median = statistics.median(entry[MEDIAN] for entry in logged)
    largest = max(entry[MAXIMUM] for entry in logged)
    text = " ".join(str(render_model_card(trainer)).split())
    assert f"by {median:.4g} of the change" in text or f"by {median:.4f} of the change" in text
    assert f"at most {largest:.4f} in any module" in text or f"at most {largest:.4g} in any module" in text
