"""Stacked LoRA equals PEFT's combination of adapters, and the singular value decomposition of full matrices."""

from __future__ import annotations

import copy
import statistics

import numpy as np
import pytest
import torch
from federations import CLIENTS, build_federation
from lora_states import BEFORE, HEAD, NUM_IN, NUM_OUT, RANK, A, B, client_states, product, random_state
from peft import LoraConfig, get_peft_model
from robust_reference import as_update, run
from tiny import tiny_model
from torch import nn

from hf_federated import ClientSpec, FedAvg, FederatedCallback, StackedLora
from hf_federated.aggregation.stacked_lora import TRUNCATION, num_kept
from hf_federated.utils.lora_modules import find_lora_modules


def mean_product(states, examples):
    total = sum(examples.values())
    return sum(examples[name] / total * product(state) for name, state in states.items())


def weighted(states):
    return {name: 1 + number for number, name in enumerate(states)}


SIZES = {"stacked": (60, 50), "dense": (NUM_OUT, NUM_IN)}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rank", [None, 1])
def test_new_product_is_the_nearest_matrix_of_the_rank(size, rank):
    before = random_state(50, size=size)
    states = {f"client {number}": random_state(number, size=size) for number in range(5)}
    examples = weighted(states)
    method = StackedLora(rank)
    found = run(method, before, states, examples)
    ideal = mean_product(states, examples)
    u, s, vh = np.linalg.svd(ideal, full_matrices=False)
    kept = rank or RANK
    np.testing.assert_allclose(product(found), (u[:, :kept] * s[:kept]) @ vh[:kept], rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.svd(product(found), compute_uv=False)[:kept], s[:kept], rtol=0, atol=1e-12)
    head = sum(examples[name] / 15 * state[HEAD] for name, state in states.items())
    torch.testing.assert_close(found[HEAD], head, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_logged_truncation_equals_the_definition(size):
    before = random_state(50, size=size)
    states = {f"client {number}": random_state(number, size=size) for number in range(5)}
    method = StackedLora()
    found = run(method, before, states, weighted(states))
    ideal = mean_product(states, weighted(states))
    error = np.linalg.norm(product(found) - ideal) / np.linalg.norm(ideal - product(before))
    assert method.truncation[TRUNCATION] == pytest.approx(error, rel=1e-9)
    assert method.truncation[f"{TRUNCATION}_max"] == pytest.approx(error, rel=1e-9)
    assert error > 0.1


@pytest.mark.parametrize("seed", range(10))
def test_clients_that_change_nothing_give_a_finite_truncation(seed):
    """As clients whose gradients are zero. The norm of their change consists of rounding errors, and can be 0."""
    before = random_state(seed, size=SIZES["stacked"])
    method = StackedLora()
    found = run(method, before, {name: copy.deepcopy(before) for name in ("a", "b")})
    np.testing.assert_allclose(product(found), product(before), rtol=0, atol=1e-12)
    assert np.isfinite(list(method.truncation.values())).all()


def test_a_rank_that_is_the_sum_of_the_ranks_loses_nothing():
    """The clients have rank 2 in factors of rank 6, whose other rows and columns are zero."""
    size, wide = (20, 18), 3 * RANK
    before = random_state(50, size=size, rank=wide)
    narrow = {f"client {number}": random_state(number, size=size) for number in range(3)}
    states = {
        name: {
            A: torch.cat([state[A], torch.zeros(wide - RANK, size[1])]),
            B: torch.cat([state[B], torch.zeros(size[0], wide - RANK)], 1),
            HEAD: state[HEAD],
        }
        for name, state in narrow.items()
    }
    method = StackedLora()
    found = run(method, before, states)
    np.testing.assert_allclose(product(found), mean_product(narrow, dict.fromkeys(narrow, 1)), rtol=0, atol=1e-12)
    assert method.truncation[TRUNCATION] < 1e-12


def test_factors_stay_close_to_the_former_ones():
    """Without a change, the rotation restores factors with orthogonal rows of one norm."""
    basis = torch.linalg.qr(BEFORE[A].T)[0].T
    before = {**BEFORE, A: 0.5 * basis}
    found = run(StackedLora(), before, {"a": before, "b": before})
    for name in (A, B):
        torch.testing.assert_close(found[name], before[name], rtol=0, atol=1e-12)


def test_directions_without_energy_stay_trainable():
    states = client_states()
    found = run(StackedLora(rank=1), BEFORE, states)
    assert np.linalg.matrix_rank(product(found)) == 1
    assert np.linalg.matrix_rank(found[A].numpy()) == RANK


@pytest.mark.parametrize(
    ("energy", "expected"), [(None, 4), (1.0, 4), (0.98, 3), (16 / 21.25, 1), (0.76, 2), (1e-6, 1)]
)
def test_energy_keeps_the_smallest_number_of_singular_values(energy, expected):
    assert num_kept(torch.tensor([4.0, 2.0, 1.0, 0.5], dtype=torch.float64), energy) == expected


def test_energy_limits_the_rank_of_the_product():
    states = client_states()
    found = run(StackedLora(energy=0.5), BEFORE, states)
    s = np.linalg.svd(mean_product(states, dict.fromkeys(states, 1)), compute_uv=False)
    assert s[0] ** 2 / (s**2).sum() > 0.5
    assert np.linalg.matrix_rank(product(found)) == 1


def test_one_client_gives_its_product():
    states = client_states(1)
    found, averaged = run(StackedLora(), BEFORE, states), run(FedAvg(), BEFORE, states)
    np.testing.assert_allclose(product(found), product(averaged), rtol=0, atol=1e-12)


# ---- PEFT


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 9), nn.Linear(9, 5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("combination", ["cat", "svd"])
def test_aggregate_equals_the_combination_of_adapters_of_peft(dtype, tolerance, combination):
    ranks, rank = ({"a": 1, "b": 2, "c": 3}, 6) if combination == "cat" else ({"a": 1, "b": 2, "c": 2}, 2)
    torch.manual_seed(0)
    model = get_peft_model(TwoLayers().to(dtype), LoraConfig(r=rank, lora_alpha=8, target_modules=["first", "second"]))
    configs, adapters = {}, copy.deepcopy(model)
    for name, own in ranks.items():
        configs[name] = LoraConfig(r=own, lora_alpha=4, use_rslora=name == "c", target_modules=["first", "second"])
        adapters.add_adapter(name, configs[name])
    with torch.no_grad():
        for name, parameter in adapters.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, dtype=dtype))
    shares = {"a": 0.5, "b": 0.25, "c": 0.25}
    options = {"svd_rank": rank} if combination == "svd" else {}
    adapters.add_weighted_adapter(
        list(shares), list(shares.values()), "combined", combination_type=combination, **options
    )
    before = {name: value.detach() for name, value in model.named_parameters() if "lora_" in name}
    method = StackedLora()
    method.check_model(model, configs)
    accumulator, state = method.accumulator(before), dict(adapters.named_parameters())
    for client_id, share in shares.items():
        own = {name: state[name.replace("default", client_id)].detach() for name in before}
        expected = {name: value.shape for name, value in method.expected_for(client_id, before).items()}
        if combination == "cat":
            assert {name: value.shape for name, value in own.items()} == expected
        update = as_update(client_id, own, int(4 * share))
        accumulator.add(method.whole_update(update, before))
    found = method.aggregate(accumulator, before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in found:
                parameter.copy_(found[name])
    for layer in ("first", "second"):
        ours = getattr(model.base_model.model, layer).get_delta_weight("default")
        theirs = getattr(adapters.base_model.model, layer).get_delta_weight("combined")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))


# ---- Federations


class Updates(FederatedCallback):
    """Records the shapes of the factors that the server adds, and the global states."""

    def __init__(self) -> None:
        self.states, self.updates = [], []

    def on_round_begin(self, args, state, control, round, **kwargs):
        self.states.append({name: value.clone() for name, value in round.state.items()})
        self.updates.append({})

    def on_client_end(self, args, state, control, update, **kwargs):
        self.updates[-1][update.client_id] = {name: value.clone() for name, value in update.state.items()}


def lora_model(rank=4):
    torch.manual_seed(0)
    return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["query"]))


def train(directory, specs=None, num_rounds=2, **trainer):
    updates = Updates()
    trainer = build_federation(
        directory,
        num_rounds=num_rounds,
        federation={"aggregation": "stacked_lora"},
        trainer={"model": lora_model(), "callbacks": [updates], "clients": specs or {}, **trainer},
    )
    trainer.train()
    return trainer, updates


SPECS = {
    "north": ClientSpec(peft_config=LoraConfig(r=1, lora_alpha=4)),
    "west": ClientSpec(peft_config=LoraConfig(r=2, lora_alpha=8)),
}


def test_clients_train_and_send_factors_of_their_own_rank(tmp_path):
    trainer, updates = train(tmp_path / "ranks", SPECS)
    for round in updates.updates:
        for name, rank in {"north": 1, "south": 4, "west": 2}.items():
            for key, value in round[name].items():
                if "lora_" in key:
                    assert int(value.any(1 if "lora_A" in key else 0).sum()) == rank, (name, key)
    equal, _ = train(tmp_path / "equal")
    (first, _), (expected, _) = trainer.ledger.rounds(), equal.ledger.rounds()
    # Two clients save 3 and 2 of 4 rows of float32 values.
    saved = sum(value.numel() // 4 * 4 * (3 + 2) for key, value in updates.states[0].items() if "lora_" in key)
    for direction in ("bytes_up", "bytes_down"):
        assert saved <= expected[direction] - first[direction] < saved + 2048


def test_a_client_with_a_small_rank_trains_as_its_own_adapter(tmp_path):
    """The padded model of the server computes the update of a model with the rank and the scale of the client."""
    config = LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=24, target_modules=["query"])
    _, updates = train(tmp_path / "padded", {"north": ClientSpec(peft_config=config)}, num_rounds=1)
    torch.manual_seed(0)
    own = get_peft_model(tiny_model(), config)
    method = StackedLora()
    method.check_model(lora_model(), {"north": config})
    start = method.state_for("north", updates.states[0])
    own.load_state_dict({**own.state_dict(), **start})
    trainer = build_federation(
        tmp_path / "own",
        {"north": CLIENTS["north"], "other": CLIENTS["south"]},
        num_rounds=1,
        trainer={"model": own, "callbacks": [found := Updates()]},
    )
    trainer.train()
    for name, value in found.updates[0]["north"].items():
        padded = updates.updates[0]["north"][name]
        if "lora_A" in name:
            padded = padded[:2]
        elif "lora_B" in name:
            padded = padded[:, :2] * (8 / 4) / (24 / 2)
        torch.testing.assert_close(value, padded, rtol=1e-5, atol=1e-7)


def test_the_scale_of_the_model_is_restored_after_an_error(tmp_path):
    class Fails(FederatedCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("no power")

    model = lora_model()
    before = {name: module.scaling for name, module in find_lora_modules(model).items()}
    trainer = build_federation(
        tmp_path,
        {"north": CLIENTS["north"], "south": CLIENTS["south"]},
        federation={"aggregation": "stacked_lora"},
        trainer={"model": model, "clients": {"north": SPECS["north"]}, "client_callbacks": [Fails()]},
    )
    with pytest.raises(RuntimeError):
        trainer.train()
    assert {name: module.scaling for name, module in find_lora_modules(model).items()} == before
    assert set(before.values()) == {2.0}


def test_the_log_has_the_truncation(tmp_path):
    trainer, _ = train(tmp_path)
    logged = [entry[TRUNCATION] for entry in trainer.state.log_history if TRUNCATION in entry]
    assert len(logged) == 2 and all(0 < value < 1 for value in logged)
    assert statistics.median(logged) <= max(entry.get(f"{TRUNCATION}_max", 0) for entry in trainer.state.log_history)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(r=8), "r=8, but the server's model has the rank 4. Give the server's model the largest rank"),
        (LoraConfig(r=2, rank_pattern={"query": 1}), "'north' sets rank_pattern=.*Remove it"),
    ],
)
def test_configurations_of_clients_are_checked(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, {"north": ClientSpec(peft_config=config)})


def test_ranks_of_clients_need_stacked_lora(tmp_path):
    with pytest.raises(ValueError, match="same shapes. Use aggregation='stacked_lora', or leave `peft_config` out"):
        build_federation(tmp_path, trainer={"model": lora_model(), "clients": SPECS})


@pytest.mark.parametrize(("kwargs", "message"), [({"rank": 0}, "at least 1"), ({"energy": 1.5}, "at most 1")])
def test_arguments_are_checked(kwargs, message):
    with pytest.raises(ValueError, match=message):
        StackedLora(**kwargs)


def test_a_rank_above_that_of_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rank=9, but the server's model has the rank 4. Set at most 4"):
        build_federation(
            tmp_path,
            federation={"aggregation": "stacked_lora", "aggregation_kwargs": {"rank": 9}},
            trainer={"model": lora_model()},
        )
