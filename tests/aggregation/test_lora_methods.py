"""Methods for LoRA factors: the new product of a module equals a computation with full matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import CLIENTS, build_federation
from lora_states import BEFORE, HEAD, RANK, A, B, client_states, product, random_state
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig, VeraConfig, get_peft_model
from robust_reference import as_update
from tiny import same_weights, tiny_model

from hf_federated import AGGREGATIONS, FederatedCallback, FedIT, FedSVD, FFALoRA, RoLoRA, Round
from hf_federated.aggregation.lora_factors import factored_svd


ONE_FACTOR = {
    "ffa_lora": (FFALoRA, 0, A),
    "fedsvd": (FedSVD, 0, A),
    "rolora B": (RoLoRA, 0, A),
    "rolora A": (RoLoRA, 1, B),
}
one_factor = pytest.mark.parametrize("name", ONE_FACTOR)
LORA_METHODS = [name for name, cls in AGGREGATIONS.items() if cls.needs_lora]


def run_round(method, states, number=0, num_examples=None, before=BEFORE):
    """Aggregate the states of all clients in a round, as the server does."""
    method.setup(3, len(states))
    method.begin(Round(number, tuple(states), before))
    accumulator = method.accumulator(before)
    for client_id, state in states.items():
        expected = method.expected_for(client_id, before)
        sent = {name: state[name] for name in expected}
        update = as_update(client_id, sent, (num_examples or {}).get(client_id, 1))
        accumulator.add(method.whole_update(update, before))
    return method.aggregate(accumulator, before)


def states_with(frozen):
    """The clients have the global value of a factor."""
    return {name: {**state, frozen: BEFORE[frozen]} for name, state in client_states().items()}


@one_factor
def test_mean_of_one_factor_is_the_mean_of_the_products(name):
    cls, number, frozen = ONE_FACTOR[name]
    states = states_with(frozen)
    examples = {client_id: 1 + index for index, client_id in enumerate(states)}
    found = run_round(cls(), states, number, examples)
    total = sum(examples.values())
    ideal = sum(examples[client_id] / total * product(state) for client_id, state in states.items())
    change = np.linalg.norm(ideal - product(BEFORE))
    assert np.linalg.norm(product(found) - ideal) / change < 1e-12
    head = sum(examples[client_id] / total * state[HEAD] for client_id, state in states.items())
    torch.testing.assert_close(found[HEAD], head, rtol=0, atol=1e-12)


@one_factor
def test_clients_send_one_factor(name):
    cls, number, frozen = ONE_FACTOR[name]
    method = cls()
    method.begin(Round(number, ("a",), BEFORE))
    assert method.expected_for("a", BEFORE).keys() == BEFORE.keys() - {frozen}
    assert method.state_for("a", BEFORE) is BEFORE


@pytest.mark.parametrize("name", [*ONE_FACTOR, "fedit"])
def test_one_client_gives_its_product(name):
    cls, number, frozen = ONE_FACTOR.get(name, (FedIT, 0, None))
    states = client_states(1) if frozen is None else dict(list(states_with(frozen).items())[:1])
    found = run_round(cls(), states, number)
    np.testing.assert_allclose(product(found), product(next(iter(states.values()))), rtol=0, atol=1e-12)


def test_fedsvd_writes_the_dense_singular_values_into_the_factors():
    states = states_with(A)
    found = run_round(FedSVD(), states)
    mean = sum(state[B] for state in states.values()) / len(states)
    _, s, _ = np.linalg.svd((mean @ BEFORE[A]).numpy())
    np.testing.assert_allclose(found[A] @ found[A].T, np.eye(RANK), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[B].T @ found[B], np.diag(s[:RANK] ** 2), rtol=0, atol=1e-12)


def test_fedsvd_keeps_the_rows_of_a_zero_product_trainable():
    before = {**BEFORE, B: torch.zeros_like(BEFORE[B])}
    found = run_round(FedSVD(), {"a": before, "b": before}, before=before)
    np.testing.assert_allclose(found[A] @ found[A].T, np.eye(RANK), rtol=0, atol=1e-12)
    assert not found[B].any()
    # The rows span the same space.
    coordinates = torch.linalg.lstsq(found[A].T, before[A].T)
    torch.testing.assert_close(found[A].T @ coordinates.solution, before[A].T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(9, 4, 6), (5, 7, 12), (40, 3, 8)])
def test_factored_svd_equals_the_svd_of_the_product(shape):
    num_out, rank, num_in = shape
    state = random_state(0, size=(num_out, num_in), rank=rank)
    u, s, v = factored_svd(state[B], state[A])
    dense = np.linalg.svd(product(state), compute_uv=False)
    np.testing.assert_allclose(s, dense[: len(s)], rtol=0, atol=1e-12)
    np.testing.assert_allclose((u * s) @ v.T, product(state), rtol=0, atol=1e-12)


# ---- Federations


class States(FederatedCallback):
    """Records the global state before each round, and after the last one."""

    def __init__(self) -> None:
        self.before = []

    def on_round_begin(self, args, state, control, round, **kwargs):
        self.before.append({name: value.clone() for name, value in round.state.items()})

    def on_round_end(self, args, state, control, round, **kwargs):
        self.after = round.state


def lora_model(**kwargs):
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], **kwargs))


def train(directory, aggregation, num_rounds=2, model=None, **federation):
    states = States()
    trainer = build_federation(
        directory,
        num_rounds=num_rounds,
        federation={"aggregation": aggregation, **federation},
        trainer={"model": model or lora_model(), "callbacks": [states]},
    )
    trainer.train()
    return trainer, [*states.before, states.after]


def changed(before, after, part):
    return any(not torch.equal(value, after[name]) for name, value in before.items() if part in name)


def test_fedit_gives_the_bytes_of_fedavg(tmp_path):
    fedit, _ = train(tmp_path / "fedit", "fedit")
    fedavg, _ = train(tmp_path / "fedavg", "fedavg")
    assert same_weights(fedit.model, fedavg.model)
    assert fedit.ledger.to_dict() == fedavg.ledger.to_dict()


@pytest.mark.parametrize(
    ("aggregation", "moved"),
    [("ffa_lora", ["B", "B", "B"]), ("rolora", ["B", "A", "B"]), ("fedit", ["AB", "AB", "AB"])],
)
def test_clients_train_the_factors_of_the_round(tmp_path, aggregation, moved):
    _, states = train(tmp_path, aggregation, num_rounds=3)
    for number, factors in enumerate(moved):
        for factor in "AB":
            # In the first round of `fedit`, A moves by the decay of its weights and by the second local step.
            assert changed(states[number], states[number + 1], f"lora_{factor}") == (factor in factors)
        assert changed(states[number], states[number + 1], "classifier")


class Trained(FederatedCallback):
    """Records the factors that each local training changed."""

    def __init__(self) -> None:
        self.factors = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.before = {name: value.detach().clone() for name, value in model.named_parameters() if "lora_" in name}

    def on_train_end(self, args, state, control, model, **kwargs):
        changed = {
            name for name, value in model.named_parameters() if "lora_" in name and (value != self.before[name]).any()
        }
        self.factors.append("".join(factor for factor in "AB" if any(f"lora_{factor}" in name for name in changed)))


@pytest.mark.parametrize(("aggregation", "expected"), [("ffa_lora", "BBB"), ("rolora", "BAB"), ("fedsvd", "BBB")])
def test_the_other_factor_keeps_its_value_on_a_client(tmp_path, aggregation, expected):
    trained = Trained()
    trainer = build_federation(
        tmp_path,
        num_rounds=3,
        federation={"aggregation": aggregation},
        trainer={"model": lora_model(), "client_callbacks": [trained]},
        weight_decay=0.1,
    )
    trainer.train()
    assert trained.factors == [factor for factor in expected for _ in CLIENTS]


@pytest.mark.parametrize("aggregation", ["ffa_lora", "rolora", "fedsvd"])
def test_clients_send_fewer_bytes_and_receive_both_factors(tmp_path, aggregation):
    trainer, states = train(tmp_path / "one", aggregation, num_rounds=1)
    both, _ = train(tmp_path / "both", "fedit", num_rounds=1)
    (measured,), (expected,) = trainer.ledger.rounds(), both.ledger.rounds()
    assert measured["bytes_down"] == expected["bytes_down"]
    frozen = sum(value.nbytes for name, value in states[0].items() if "lora_A" in name)
    saved = expected["bytes_up"] - measured["bytes_up"]
    assert len(CLIENTS) * frozen <= saved < len(CLIENTS) * (frozen + 1024)


OTHER_ADAPTERS = {
    "DoRA": LoraConfig(use_dora=True, target_modules=["query"]),
    "ADALORA": AdaLoraConfig(init_r=2, target_r=1, total_step=9, target_modules=["query"]),
    "LOHA": LoHaConfig(r=2, target_modules=["query"]),
    "LOKR": LoKrConfig(r=2, target_modules=["query"]),
    "VERA": VeraConfig(r=2, target_modules=["query"]),
    "OFT": OFTConfig(r=0, oft_block_size=4, target_modules=["query"]),
    "IA3": IA3Config(target_modules=["query"], feedforward_modules=[]),
}
PAIRS = [("DoRA", name) for name in LORA_METHODS] + [(kind, "fedsvd") for kind in OTHER_ADAPTERS]


@pytest.mark.parametrize(("kind", "aggregation"), PAIRS)
def test_other_adapters_are_refused_with_the_method_that_works(tmp_path, kind, aggregation):
    model = get_peft_model(tiny_model(), OTHER_ADAPTERS[kind])
    with pytest.raises(ValueError, match=f"an adapter of type {kind}: .*Use LoRA, or aggregation='fedavg'"):
        build_federation(tmp_path, federation={"aggregation": aggregation}, trainer={"model": model})


@pytest.mark.parametrize("aggregation", LORA_METHODS)
def test_a_frozen_factor_is_refused(tmp_path, aggregation):
    model = lora_model()
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="both factors are exchanged, but there are none.*aggregation='fedavg'"):
        build_federation(tmp_path, federation={"aggregation": aggregation}, trainer={"model": model})


def test_the_state_of_an_optimizer_is_not_carried_to_other_factors(tmp_path):
    federation = {"aggregation": "fedsvd", "client_optimizer_state": "carry"}
    with pytest.raises(ValueError, match="moments of the optimizer.*Set client_optimizer_state='reset'"):
        build_federation(tmp_path, federation=federation, trainer={"model": lora_model()})
