"""NormBoundedMean, CenteredClipping and FLTrust against a reference in numpy and float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import robust_reference as reference
import torch
from client_parts import received
from lora_states import BEFORE as LORA_BEFORE
from lora_states import HEAD, RANK, A, B
from lora_states import assert_equals as assert_equals_nearest_matrix
from lora_states import client_states as lora_states
from lora_states import vectors as lora_vectors
from robust_reference import BEFORE, before, client_states, run, vector, vectors

from hf_federated import CenteredClipping, ClipUpdate, FedAvg, FLTrust, NormBoundedMean
from hf_federated.messages import Fit
from hf_federated.messages.serialization import pack, unpack


X = vector(BEFORE)
NORMS = np.linalg.norm(vectors(client_states()) - X, axis=1)


def close(state, expected, atol=1e-9):
    np.testing.assert_allclose(vector(state), expected, rtol=0, atol=atol)


# ---- NormBoundedMean


@pytest.mark.parametrize("max_norm", [3.0, float(np.median(NORMS)), 100.0])
def test_norm_bounded_mean_equals_the_reference(max_norm):
    states = client_states()
    result = run(NormBoundedMean(max_norm), before(), states)
    close(result, reference.norm_bounded_mean(X, vectors(states), max_norm, np.ones(len(states))))
    assert result["count"] == BEFORE["count"]


def test_default_bound_is_the_median_norm_of_the_round():
    states = client_states()
    result = run(NormBoundedMean(), before(), states)
    close(result, reference.norm_bounded_mean(X, vectors(states), float(np.median(NORMS)), np.ones(len(states))))


@pytest.mark.parametrize("max_norm", [None, 3.0])
def test_norm_bounded_mean_uses_the_weights_of_the_clients(max_norm):
    states = client_states()
    examples = {client_id: 1 + number for number, client_id in enumerate(states)}
    result = run(NormBoundedMean(max_norm, weighting="examples"), before(), states, examples)
    limit = float(np.median(NORMS)) if max_norm is None else max_norm
    close(result, reference.norm_bounded_mean(X, vectors(states), limit, np.arange(1.0, 1 + len(states))))


def test_fixed_bound_keeps_no_update():
    algorithm = NormBoundedMean(1.0)
    accumulator = algorithm.accumulator(before())
    assert not accumulator.collections
    assert NormBoundedMean().accumulator(before()).collections
    assert NormBoundedMean(1.0).accumulator(LORA_BEFORE).collections


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_bound_gives_the_bits_of_fedavg(dtype):
    states = client_states(dtype=dtype)
    result = run(NormBoundedMean(1e9), before(dtype), states)
    expected = run(FedAvg(weighting="uniform"), before(dtype), states)
    assert all(torch.equal(result[name], expected[name]) for name in ("w", "b"))


def test_bound_on_the_server_equals_clipping_on_the_clients():
    states = client_states()
    fit = Fit(0, "a", 0, before())
    clipped = {
        client_id: ClipUpdate(2.0).client_send(reference.as_update(client_id, state), fit, {}).state
        for client_id, state in states.items()
    }
    expected = run(FedAvg(weighting="uniform"), before(), clipped)
    close(run(NormBoundedMean(2.0), before(), states), vector(expected), atol=1e-6)


@pytest.mark.parametrize("value", [1e6, 1e30])
@pytest.mark.parametrize("max_norm", [None, 3.0])
def test_one_hostile_client_moves_the_mean_by_its_share_of_the_bound(max_norm, value):
    states = client_states(dtype=torch.float32)
    honest = dict(list(states.items())[1:])
    states["client 0"] = {
        name: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor
        for name, tensor in states["client 0"].items()
    }
    result = vector(run(NormBoundedMean(max_norm), before(torch.float32), states))
    limit = np.sort(NORMS)[-1] if max_norm is None else max_norm
    without = reference.norm_bounded_mean(X, vectors(honest), limit, np.ones(len(honest)))
    assert np.linalg.norm(result - without) <= 2.5 * limit / len(states) + (max_norm is None) * limit


def test_norm_of_lora_modules_is_the_norm_of_the_product():
    states = lora_states()
    points, start = lora_vectors(states), lora_vectors({"": LORA_BEFORE})[0]
    expected = reference.norm_bounded_mean(start, points, 1.0, np.ones(len(points)))
    assert_equals_nearest_matrix(run(NormBoundedMean(1.0), LORA_BEFORE, states), expected)


# ---- CenteredClipping


@pytest.mark.parametrize("num_iterations", [1, 3])
@pytest.mark.parametrize("radius", [None, 2.0, 100.0])
def test_centered_clipping_equals_the_reference_over_three_rounds(radius, num_iterations):
    algorithm = CenteredClipping(radius, num_iterations=num_iterations)
    algorithm.setup(3, 9)
    state, x, center = before(), X, np.zeros_like(X)
    for number in range(3):
        # The update of a client is its momentum, see the tests of the client side.
        states = client_states(seed=number)
        center = reference.centered_clipping(vectors(states) - x, center, radius, num_iterations)
        x = x + center
        state = run(algorithm, state, states)
        close(state, x)


def test_large_radius_without_momentum_gives_the_mean():
    states = client_states()
    expected = run(FedAvg(weighting="uniform"), before(), states)
    close(run(CenteredClipping(1e9, client_momentum=0.0), before(), states), vector(expected))


def test_constant_small_attack_moves_less_than_with_a_bound_around_zero():
    """The center remembers the direction of the honest clients."""
    generator = np.random.default_rng(0)
    direction = np.ones(29) / math.sqrt(29)
    moved = {}
    for name, algorithm in (("centered", CenteredClipping(0.5)), ("bounded", NormBoundedMean(0.5))):
        algorithm.setup(10, 10)
        state = {"w": torch.zeros(29, dtype=torch.float64)}
        for _ in range(10):
            honest = {f"h{i}": torch.from_numpy(0.5 * direction + 0.01 * generator.normal(size=29)) for i in range(8)}
            hostile = {f"x{i}": torch.from_numpy(-50.0 * direction) for i in range(2)}
            states = {client: {"w": state["w"] + change} for client, change in {**honest, **hostile}.items()}
            state = run(algorithm, state, states)
        moved[name] = float(state["w"].numpy() @ direction)
    assert moved["centered"] > 1.1 * moved["bounded"] > 0


def test_fixed_radius_and_one_iteration_keep_no_update():
    assert not CenteredClipping(1.0).accumulator(before()).collections
    assert CenteredClipping().accumulator(before()).collections
    assert CenteredClipping(1.0, num_iterations=2).accumulator(before()).collections


@pytest.mark.parametrize("kwargs", [{"radius": 2.0}, {}, {"radius": 2.0, "server_optimizer": "momentum"}])
def test_resumed_run_continues_with_the_same_bits(kwargs):
    def build():
        algorithm = CenteredClipping(**kwargs)
        algorithm.setup(4, 9)
        return algorithm

    algorithm, state = build(), before(torch.float32)
    for number in range(4):
        if number == 2:
            tree = unpack(pack({"algorithm": algorithm.state_dict(), "state": state}))
        state = run(algorithm, state, client_states(seed=number, dtype=torch.float32))
    resumed, resumed_state = build(), tree["state"]
    resumed.load_state_dict(tree["algorithm"])
    for number in (2, 3):
        resumed_state = run(resumed, resumed_state, client_states(seed=number, dtype=torch.float32))
    assert torch.equal(resumed_state["w"], state["w"])
    assert pack(resumed.state_dict()) == pack(algorithm.state_dict())


def test_client_momentum_equals_the_recursion_of_the_paper():
    start = torch.linspace(0, 1, 4, dtype=torch.float64)
    memory, momentum = {}, None
    for number in range(4):
        change = torch.full((4,), float(number + 1), dtype=torch.float64)
        message = Fit(0, "a", 0, {"w": start}, settings={"client_momentum": 0.8})
        part = received(CenteredClipping(), message, memory)
        part.on_gradients({"w": torch.nn.Parameter(start + change)})
        update = part.send(reference.as_update("a", {"w": start + change}))
        momentum = change if momentum is None else 0.8 * momentum + 0.2 * change
        torch.testing.assert_close(update.state["w"], start + momentum)
        memory = part.memory
        assert not update.extra


def test_centered_clipping_refuses_both_factors_and_names_the_alternative():
    with pytest.raises(ValueError, match="does not support LoRA modules .* Freeze the factors A"):
        CenteredClipping().check_exchange(LORA_BEFORE, 5)
    CenteredClipping().check_exchange({B: LORA_BEFORE[B]}, 5)


# ---- FLTrust


def trusting(server_state, **kwargs):
    algorithm = FLTrust(**kwargs)
    algorithm.on_server_update(reference.as_update("server", server_state))
    return algorithm


def test_fltrust_equals_the_reference():
    states = client_states()
    server_state = client_states(seed=7)["client 3"]
    result = run(trusting(server_state), before(), states)
    close(result, reference.fltrust(X, vectors(states), vector(server_state)))


def test_majority_of_hostile_clients_is_tolerated_with_examples_on_the_server():
    generator = np.random.default_rng(1)
    honest = {f"h{i}": torch.from_numpy(1.0 + 0.1 * generator.normal(size=20)) for i in range(2)}
    hostile = {f"x{i}": torch.from_numpy(-1e6 * (1 + generator.normal(size=20) / 10)) for i in range(6)}
    start = {"w": torch.zeros(20, dtype=torch.float64)}
    states = {client: {"w": value} for client, value in {**honest, **hostile}.items()}
    result = run(trusting({"w": torch.ones(20, dtype=torch.float64)}), start, states)
    assert torch.linalg.vector_norm(result["w"] - 1) < 1


def test_round_without_a_trusted_client_changes_nothing():
    states = client_states()
    opposite = {name: 2 * BEFORE[name] - value for name, value in states["client 0"].items()}
    result = run(trusting(opposite), before(), {"client 0": states["client 0"]})
    assert all(torch.equal(result[name], BEFORE[name]) for name in BEFORE)


def test_update_without_a_change_has_no_trust():
    states = {**client_states(2), "idle": before()}
    server_state = client_states(seed=7)["client 3"]
    result = run(trusting(server_state), before(), states)
    active = {client_id: state for client_id, state in states.items() if client_id != "idle"}
    close(result, reference.fltrust(X, vectors(active), vector(server_state)))


def test_trust_in_lora_modules_comes_from_the_product():
    states, server_state = lora_states(), lora_states(8)["client 7"]
    start = lora_vectors({"": LORA_BEFORE})[0]
    result = run(trusting(server_state), LORA_BEFORE, states)
    expected = reference.fltrust(start, lora_vectors(states), lora_vectors({"": server_state})[0])
    assert_equals_nearest_matrix(result, expected)
    assert result[A].shape[0] == RANK and HEAD in result
