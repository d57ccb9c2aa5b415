"""Robust aggregation of LoRA factors: the rules act on the products `B A`, against a reference with full matrices."""

from __future__ import annotations

import numpy as np
import pytest
import robust_reference as reference
import torch
from lora_states import (
    BEFORE,
    HEAD,
    NUM_IN,
    NUM_OUT,
    RANK,
    A,
    B,
    assert_equals,
    client_states,
    product,
    random_state,
    vectors,
)
from peft import LoraConfig, get_peft_model
from robust_reference import run
from tiny import tiny_model

from hf_federated import CoordinateMedian, GeometricMedian, Krum, TrimmedMean
from hf_federated.adapters import Exchange
from hf_federated.aggregation import lora_factors
from hf_federated.aggregation.lora_factors import FactorPair, find_other_factors, find_pairs


RULES = {
    "median": (CoordinateMedian, lambda points: reference.median(points)),
    "trimmed mean": (lambda **kwargs: TrimmedMean(2, **kwargs), lambda points: reference.trimmed_mean(points, 2)),
    "krum": (lambda **kwargs: Krum(2, **kwargs), lambda points: reference.krum(points, 2)),
    "multi-krum": (lambda **kwargs: Krum(2, 3, **kwargs), lambda points: reference.krum(points, 2, 3)),
    "geometric median": (
        lambda **kwargs: GeometricMedian(2000, **kwargs),
        lambda points: reference.geometric_median(points, np.ones(len(points))),
    ),
}
all_rules = pytest.mark.parametrize("rule", RULES)


@all_rules
@pytest.mark.parametrize("max_memory_mb", [256, 1e-3])
def test_rule_acts_on_the_products(rule, max_memory_mb):
    build, expected = RULES[rule]
    states = client_states()
    assert_equals(run(build(max_memory_mb=max_memory_mb), BEFORE, states), expected(vectors(states)))


@pytest.mark.parametrize("num_clients", [7, 160])
def test_factors_of_large_modules_are_stacked(num_clients):
    """A module of 300 x 300 is larger than the stacked factors of 7 clients, and smaller than those of 160."""
    size = (300, 300)
    states = {f"{number:03}": random_state(number, size=size) for number in range(num_clients)}
    result = run(Krum(0, num_clients), random_state(99, size=size), states)
    assert_equals(result, vectors(states).mean(0), size)


def test_krum_returns_the_product_of_the_selected_client():
    states = client_states()
    result = run(Krum(2), BEFORE, states)
    expected = reference.krum(vectors(states), 2)
    np.testing.assert_allclose(product(result).ravel(), expected[: NUM_OUT * NUM_IN], rtol=0, atol=1e-12)
    assert any(torch.equal(result[HEAD], state[HEAD]) for state in states.values())


@all_rules
def test_client_cannot_choose_the_size_of_the_factors(rule):
    """The product of this client is in the middle of the others, but its factor A is a million times too large."""
    states = client_states()
    states["client 0"] = {A: BEFORE[A] * 1e6, B: BEFORE[B] / 1e6, HEAD: BEFORE[HEAD]}
    result = run(RULES[rule][0](), BEFORE, states)
    assert result[A].norm() < 2 * BEFORE[A].norm()


@all_rules
def test_factors_with_the_same_product_are_the_same_update(rule):
    """A rotation of the factors, which changes all their values, does not change the estimate."""
    build, _ = RULES[rule]
    states = client_states()
    expected = product(run(build(), BEFORE, states))
    for number, state in enumerate(states.values()):
        rotation = torch.linalg.qr(random_state(number)[HEAD][:2])[0]
        state[A], state[B] = 3.0 * rotation @ state[A], state[B] @ rotation.T / 3.0
    np.testing.assert_allclose(product(run(build(), BEFORE, states)), expected, rtol=0, atol=1e-8)


@all_rules
def test_hostile_factors_do_not_move_the_product_far(rule):
    build, _ = RULES[rule]
    states = client_states()
    honest = vectors(dict(list(states.items())[2:]))
    for client_id in list(states)[:2]:
        states[client_id] = {name: value + 1e6 for name, value in states[client_id].items()}
    result = product(run(build(), BEFORE, states)).ravel()
    center = honest.mean(0)[: NUM_OUT * NUM_IN]
    spread = np.linalg.norm(honest[:, : NUM_OUT * NUM_IN] - center, axis=1).max()
    # The truncation to the rank of the factors can add at most the distance to a matrix of this rank.
    assert np.linalg.norm(result - center) <= 2 * spread


def test_zero_products_keep_trainable_factors():
    """Before the first round, B is 0. If no client changes B, A must not become 0 too."""
    zero = {**BEFORE, B: torch.zeros_like(BEFORE[B])}
    states = {str(number): {**random_state(number), B: zero[B]} for number in range(5)}
    result = run(CoordinateMedian(), zero, states)
    assert torch.linalg.matrix_rank(result[A]) == RANK
    torch.testing.assert_close(result[A].norm(), zero[A].norm())
    assert not result[B].any()


def test_new_factors_stay_close_to_the_global_factors():
    """The rotation of the factors is chosen, so that the basis does not change arbitrarily between rounds."""
    orthogonal = torch.linalg.qr(BEFORE[A].T)[0].T
    state = {**BEFORE, A: orthogonal}
    small = {
        str(number): {name: state[name] + value for name, value in random_state(number, 1e-3).items()}
        for number in range(5)
    }
    result = run(GeometricMedian(), state, small)
    torch.testing.assert_close(result[A], state[A], rtol=0, atol=5e-3)
    torch.testing.assert_close(result[B], state[B], rtol=0, atol=5e-3)


def test_singular_vectors_of_large_matrices_are_accurate(monkeypatch):
    states = {f"{number:03}": random_state(number, size=(60, 40)) for number in range(5)}
    exact = product(run(CoordinateMedian(), random_state(99, size=(60, 40)), states))
    monkeypatch.setattr(lora_factors, "EXACT_SIZE", 8)
    result = product(run(CoordinateMedian(), random_state(99, size=(60, 40)), states))
    np.testing.assert_allclose(result, exact, rtol=0, atol=1e-2 * np.abs(exact).max())


# ---- Names of PEFT


def test_pairs_of_a_peft_model_are_found():
    model = get_peft_model(
        tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "word_embeddings"])
    )
    names = Exchange(model).names
    pairs = find_pairs(names)
    assert {name for pair in pairs for name in (pair.a, pair.b)} == {name for name in names if "lora_" in name}
    assert any("lora_embedding_A" in pair.a for pair in pairs)
    state = Exchange(model).read()
    for pair in pairs:
        b, a = pair.matrices(state)
        assert b.shape[1] == a.shape[0] == 2


def test_one_exchanged_factor_is_an_ordinary_tensor():
    assert find_pairs([B, HEAD]) == []
    assert find_pairs([A, B, HEAD]) == [FactorPair(A, B)]
    before = {B: BEFORE[B]}
    states = {client_id: {B: state[B]} for client_id, state in client_states().items()}
    expected = np.median(np.stack([state[B].numpy() for state in states.values()]), axis=0)
    np.testing.assert_allclose(run(CoordinateMedian(), before, states)[B].numpy(), expected)


def test_server_optimizer_on_both_factors_is_refused():
    with pytest.raises(ValueError, match="Freeze the factors A"):
        CoordinateMedian("momentum").check_exchange(BEFORE, 5)
    CoordinateMedian("momentum").check_exchange({B: BEFORE[B]}, 5)


@pytest.mark.parametrize("name", ["query.lora_E.default", "query.hada_w1_a.default", "query.lokr_w1.default"])
def test_adapters_with_more_factors_are_refused(name):
    assert find_other_factors([HEAD, name]) == name
    with pytest.raises(ValueError, match="product of more than two factors"):
        Krum().check_exchange({**BEFORE, name: torch.zeros(1)}, 5)
