"""States with the two factors of one LoRA module and a classifier, and their products as a reference."""

from __future__ import annotations

import numpy as np
import torch


RANK, NUM_OUT, NUM_IN, NUM_CLIENTS = 2, 7, 6, 7
A, B, HEAD = "query.lora_A.default.weight", "query.lora_B.default.weight", "classifier.weight"


def random_state(seed, scale=1.0, size=(NUM_OUT, NUM_IN), rank=RANK):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {A: draw(rank, size[1]), B: draw(size[0], rank), HEAD: draw(3, 2)}


BEFORE = random_state(100)


def client_states(num_clients=NUM_CLIENTS, **kwargs):
    """Every client changes the global state a little."""
    return {
        f"client {number}": {name: BEFORE[name] + value for name, value in random_state(number, 0.3).items()}
        for number in range(num_clients)
    }


def product(state):
    return (state[B] @ state[A]).numpy()


def vectors(states):
    """The products and all other tensors of each client as one row."""
    return np.stack(
        [np.concatenate([product(state).ravel(), state[HEAD].numpy().ravel()]) for state in states.values()]
    )


def assert_equals(result, expected, size=(NUM_OUT, NUM_IN)):
    """Compare with the nearest matrix of the rank of the factors."""
    matrix, head = expected[: size[0] * size[1]].reshape(size), expected[size[0] * size[1] :]
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    nearest = (u[:, :RANK] * s[:RANK]) @ vh[:RANK]
    np.testing.assert_allclose(product(result), nearest, rtol=0, atol=1e-8)
    np.testing.assert_allclose(result[HEAD].numpy().ravel(), head, rtol=0, atol=1e-8)
