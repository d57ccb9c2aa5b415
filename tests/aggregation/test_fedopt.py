"""FedOpt: each server optimizer against a numpy reference in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_federated import FedAvg, FedOpt
from hf_federated.aggregation.server_optimizer import SERVER_OPTIMIZERS
from hf_federated.messages import ClientUpdate
from hf_federated.messages.serialization import pack, unpack


NUM_ROUNDS = 5
# The updates of the two clients in each round do not depend on the state, so the reference needs no training.
CLIENTS = np.random.default_rng(0).normal(size=(NUM_ROUNDS, 2, 6))
EXAMPLES = (3, 5)
START = np.linspace(-1.0, 1.0, 6)


def run_round(algorithm, state, number):
    """Return the state after a round in which the clients send `CLIENTS[number]`."""
    accumulator = algorithm.accumulator(state)
    for client, num_examples in enumerate(EXAMPLES):
        client_state = {"w": torch.tensor(CLIENTS[number, client]).to(state["w"].dtype), "count": torch.tensor(number)}
        accumulator.add(ClientUpdate(number, str(client), client_state, num_examples, num_tokens=0, num_steps=1))
    return algorithm.aggregate(accumulator, state)


def start(dtype=torch.float64):
    return {"w": torch.tensor(START).to(dtype), "count": torch.tensor(-1)}


def run(algorithm, num_rounds=NUM_ROUNDS, dtype=torch.float64):
    """Return the states after each round."""
    algorithm.setup(NUM_ROUNDS, len(EXAMPLES))
    states = [start(dtype)]
    for number in range(num_rounds):
        states.append(run_round(algorithm, states[-1], number))
    return states[1:]


def reference(step, num_rounds=NUM_ROUNDS):
    """Apply `x ← step(x, g, t)` with `g = x − Σ n_i x_i / Σ n_i` and t from 1."""
    x, trajectory = START.copy(), []
    for number in range(num_rounds):
        mean = (EXAMPLES[0] * CLIENTS[number, 0] + EXAMPLES[1] * CLIENTS[number, 1]) / sum(EXAMPLES)
        x = step(x, x - mean, number + 1)
        trajectory.append(x)
    return trajectory


def assert_follows(algorithm, step):
    for state, expected in zip(run(algorithm), reference(step), strict=True):
        np.testing.assert_allclose(state["w"].numpy(), expected, rtol=0, atol=1e-12)


# ---- The optimizers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sgd_with_learning_rate_one_equals_fedavg(dtype):
    for fedopt, fedavg in zip(run(FedOpt("sgd"), dtype=dtype), run(FedAvg(), dtype=dtype), strict=True):
        torch.testing.assert_close(fedopt["w"], fedavg["w"], rtol=0, atol=1e-6)
        assert fedopt["w"].dtype == dtype


def test_sgd_scales_the_change_by_the_learning_rate():
    assert_follows(FedOpt("sgd", server_lr=0.3), lambda x, g, t: x - 0.3 * g)


def test_momentum_equals_the_closed_form_over_three_rounds():
    # x_3 = x_0 − η (g_1 + (g_2 + β g_1) + (g_3 + β g_2 + β² g_1))
    beta, lr = 0.9, 0.7
    states = [start()["w"].numpy()] + [state["w"].numpy() for state in run(FedOpt("momentum", lr, beta), 3)]
    means = [(EXAMPLES[0] * CLIENTS[r, 0] + EXAMPLES[1] * CLIENTS[r, 1]) / sum(EXAMPLES) for r in range(3)]
    g1, g2, g3 = (states[r] - means[r] for r in range(3))
    expected = START - lr * (g1 + (g2 + beta * g1) + (g3 + beta * g2 + beta**2 * g1))
    np.testing.assert_allclose(states[3], expected, rtol=0, atol=1e-12)


def test_defaults_are_momentum_0_9_and_learning_rate_one():
    for ours, written in zip(run(FedOpt()), run(FedOpt("momentum", 1.0, 0.9)), strict=True):
        assert torch.equal(ours["w"], written["w"])


def test_nesterov_equals_the_formula():
    velocity = np.zeros(6)

    def step(x, g, t):
        nonlocal velocity
        velocity = 0.9 * velocity + g
        return x - 0.7 * (g + 0.9 * velocity)

    assert_follows(FedOpt("nesterov", server_lr=0.7), step)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_corrects_the_bias_of_its_moments(decay):
    (b1, b2), eps, lr = (0.8, 0.95), 1e-3, 0.1
    m, v = np.zeros(6), np.zeros(6)

    def step(x, g, t):
        nonlocal m, v
        g = g + decay * x
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        return x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)

    assert_follows(FedOpt("adam", lr, server_betas=(b1, b2), server_eps=eps, server_weight_decay=decay), step)


def test_adamw_decouples_weight_decay_from_the_gradient():
    (b1, b2), eps, lr, decay = (0.9, 0.99), 1e-3, 0.1, 0.2
    m, v = np.zeros(6), np.zeros(6)

    def step(x, g, t):
        nonlocal m, v
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        return x * (1 - lr * decay) - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)

    assert_follows(FedOpt("adamw", lr, server_weight_decay=decay), step)


def test_adagrad_equals_the_formula():
    total = np.zeros(6)

    def step(x, g, t):
        nonlocal total
        total = total + g**2
        return x - 0.1 * g / (np.sqrt(total) + 1e-3)

    assert_follows(FedOpt("adagrad", server_lr=0.1), step)


def test_yogi_equals_algorithm_2_of_the_paper():
    (b1, b2), tau, lr = (0.9, 0.99), 1e-3, 0.1
    m, v = np.zeros(6), np.full(6, tau**2)

    def step(x, g, t):
        nonlocal m, v
        # In the paper, Δ is −g. The sign does not change v.
        m = b1 * m + (1 - b1) * -g
        v = v - (1 - b2) * g**2 * np.sign(v - g**2)
        return x + lr * m / (np.sqrt(v) + tau)

    assert_follows(FedOpt("yogi", server_lr=lr), step)


def test_diloco_is_nesterov_over_the_uniform_mean():
    assert FedOpt.diloco().settings() == FedOpt("nesterov", server_lr=0.7, weighting="uniform").settings()
    velocity, x = np.zeros(6), START.copy()
    for number, state in enumerate(run(FedOpt.diloco())):
        g = x - CLIENTS[number].mean(axis=0)
        velocity = 0.9 * velocity + g
        x = x - 0.7 * (g + 0.9 * velocity)
        np.testing.assert_allclose(state["w"].numpy(), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", SERVER_OPTIMIZERS)
def test_integer_tensors_are_copied_from_the_first_update(optimizer):
    for number, state in enumerate(run(FedOpt(optimizer, server_lr=0.1))):
        assert state["count"].item() == number and state["count"].dtype == torch.int64


# ---- Learning rate over rounds


def test_linear_schedule_decreases_over_the_rounds():
    algorithm = FedOpt("sgd", server_lr=0.5, server_lr_scheduler="linear")
    assert_follows(algorithm, lambda x, g, t: x - 0.5 * (1 - (t - 1) / NUM_ROUNDS) * g)


def test_cosine_schedule_with_warmup():
    algorithm = FedOpt("sgd", 0.5, server_lr_scheduler="cosine", server_warmup_rounds=2)

    def step(x, g, t):
        r = t - 1
        factor = r / 2 if r < 2 else 0.5 * (1 + math.cos(math.pi * (r - 2) / (NUM_ROUNDS - 2)))
        return x - 0.5 * factor * g

    assert_follows(algorithm, step)


# ---- State


ALL = [{"server_optimizer": name, "server_lr": 0.1} for name in SERVER_OPTIMIZERS]
ALL += [
    {"server_optimizer": "adam", "server_lr": 0.1, "server_lr_scheduler": "cosine", "server_warmup_rounds": 1},
    {"server_optimizer": "momentum", "server_lr_scheduler": "linear"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kwargs", ALL, ids=lambda kwargs: "-".join(map(str, kwargs.values())))
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_resumed_run_gives_identical_state(kwargs, dtype, stop):
    algorithm = FedOpt(**kwargs)
    expected = run(algorithm, dtype=dtype)

    stopped = FedOpt(**kwargs)
    state = [start(dtype), *run(stopped, stop, dtype=dtype)][-1]
    blob = pack({"algorithm": stopped.state_dict(), "state": state})

    resumed = FedOpt(**kwargs)
    resumed.setup(NUM_ROUNDS, len(EXAMPLES))
    tree = unpack(blob)
    resumed.load_state_dict(tree["algorithm"])
    assert pack({"algorithm": resumed.state_dict(), "state": tree["state"]}) == blob
    state = tree["state"]
    for number in range(stop, NUM_ROUNDS):
        state = run_round(resumed, state, number)
    assert torch.equal(state["w"], expected[-1]["w"])
    assert pack(resumed.state_dict()) == pack(algorithm.state_dict())


def test_setup_resets_the_optimizer():
    algorithm = FedOpt("adam", server_lr=0.1, server_lr_scheduler="linear")
    first, second = run(algorithm), run(algorithm)
    assert all(torch.equal(a["w"], b["w"]) for a, b in zip(first, second, strict=True))


def test_small_steps_accumulate_in_half_precision():
    # A step of 0.001 is less than half the distance between bfloat16 numbers near 1.
    algorithm = FedOpt("sgd", server_lr=0.001)
    algorithm.setup(1000, 1)
    state = {"w": torch.ones(1, dtype=torch.bfloat16)}
    for number in range(8):
        accumulator = algorithm.accumulator(state)
        accumulator.add(ClientUpdate(number, "a", {"w": state["w"] - 1}, 1, 0, 1))
        state = algorithm.aggregate(accumulator, state)
    assert state["w"].dtype == torch.bfloat16
    assert state["w"].item() == torch.tensor(1 - 8 * 0.001).bfloat16().item() != 1.0
    master = algorithm.state_dict()["parameters"]["w"]
    assert master.dtype == torch.float32
    assert master.item() == pytest.approx(1 - 8 * 0.001, abs=1e-6)


def test_returned_state_shares_no_memory_with_the_optimizer():
    algorithm = FedOpt("sgd", server_lr=0.5)
    algorithm.setup(NUM_ROUNDS, 2)
    state = run_round(algorithm, start(torch.float32), 0)
    kept = algorithm.state_dict()["parameters"]["w"].clone()
    state["w"].zero_()
    assert torch.equal(algorithm.state_dict()["parameters"]["w"], kept)


def test_state_changed_between_rounds_overrides_the_optimizer_copy():
    algorithm = FedOpt("sgd", server_lr=0.5)
    algorithm.setup(NUM_ROUNDS, 2)
    state = run_round(algorithm, start(), 0)
    state["w"] = state["w"] + 5.0
    mean = (EXAMPLES[0] * CLIENTS[1, 0] + EXAMPLES[1] * CLIENTS[1, 1]) / sum(EXAMPLES)
    expected = state["w"].numpy() - 0.5 * (state["w"].numpy() - mean)
    np.testing.assert_allclose(run_round(algorithm, state, 1)["w"].numpy(), expected, rtol=0, atol=1e-12)


# ---- Invalid arguments


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"server_optimizer": "lion"}, "`server_optimizer` is 'lion'; allowed are 'sgd', 'momentum'"),
        ({"server_lr": 0.0}, "`server_lr` is 0.0; it must be positive"),
        ({"server_momentum": 1.0}, "`server_momentum` is 1.0; it must be at least 0 and below 1"),
        (
            {"server_optimizer": "yogi", "server_weight_decay": 0.1},
            "'yogi' does not support `server_weight_decay`. Set server_optimizer='adamw'",
        ),
        ({"server_warmup_rounds": 2}, "Set a scheduler with warm-up, such as 'constant_with_warmup'"),
        ({"server_lr_scheduler": "linaer"}, "`server_lr_scheduler` is 'linaer'; allowed are 'linear', 'cosine'"),
        (
            {"server_lr_scheduler": "reduce_lr_on_plateau"},
            "`server_lr_scheduler` is 'reduce_lr_on_plateau'; allowed are",
        ),
    ],
)
def test_invalid_arguments_raise_an_error(kwargs, expected):
    with pytest.raises(ValueError, match=expected):
        FedOpt(**kwargs)


def test_nesterov_without_momentum_raises_an_error():
    with pytest.raises(ValueError, match="`server_momentum`"):
        FedOpt("nesterov", server_momentum=0.0)
