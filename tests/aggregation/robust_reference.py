"""Robust aggregation in numpy and float64, on whole vectors, from the formulas of the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_federated.messages import ClientUpdate


State = dict[str, torch.Tensor]


def median(points: np.ndarray) -> np.ndarray:
    return np.median(points, axis=0)


def trimmed_mean(points: np.ndarray, num_hostile: int) -> np.ndarray:
    return np.sort(points, axis=0)[num_hostile : len(points) - num_hostile].mean(axis=0)


def krum(points: np.ndarray, num_hostile: int, num_selected: int = 1) -> np.ndarray:
    scores = []
    for number, point in enumerate(points):
        distances = sorted(((point - other) ** 2).sum() for i, other in enumerate(points) if i != number)
        scores.append(sum(distances[: len(points) - num_hostile - 2]))
    return points[np.argsort(scores, kind="stable")[:num_selected]].mean(axis=0)


def geometric_median(points: np.ndarray, shares: np.ndarray, num_iterations: int = 5000) -> np.ndarray:
    """The Weiszfeld algorithm from the mean, with as many iterations as it needs."""
    center = shares @ points / shares.sum()
    for _ in range(num_iterations):
        weights = shares / np.maximum(np.linalg.norm(points - center, axis=1), 1e-9)
        center = weights @ points / weights.sum()
    return center


def sum_of_distances(points: np.ndarray, center: np.ndarray) -> float:
    return float(np.linalg.norm(points - center, axis=1).sum())


# ---- States of clients


NUM_CLIENTS = 9
BEFORE = {
    "w": torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6),
    "b": torch.zeros(5, dtype=torch.float64),
    "count": torch.tensor(3),
}


def client_states(num_clients=NUM_CLIENTS, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"client {number}": {
            name: (value + torch.randn(value.shape, generator=generator, dtype=torch.float64)).to(dtype)
            if value.is_floating_point()
            else value + number
            for name, value in BEFORE.items()
        }
        for number in range(num_clients)
    }


def before(dtype=torch.float64):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in BEFORE.items()}


# ---- Running an algorithm


def as_update(client_id: str, state: State, num_examples: int = 1) -> ClientUpdate:
    return ClientUpdate(0, client_id, state, num_examples, num_tokens=0, num_steps=1)


def run(algorithm: Any, before: State, states: dict[str, State], num_examples: dict[str, int] | None = None) -> State:
    """Aggregate the states of all clients with an algorithm."""
    accumulator = algorithm.accumulator(before)
    for client_id, state in states.items():
        accumulator.add(as_update(client_id, state, (num_examples or {}).get(client_id, 1)))
    assert accumulator.num_updates == len(states)
    return algorithm.aggregate(accumulator, before)


def vectors(states: dict[str, State]) -> np.ndarray:
    """The states as rows, in the order of the client ids."""
    return np.stack([vector(states[client_id]) for client_id in sorted(states)])


def vector(state: State) -> np.ndarray:
    return np.concatenate([value.double().numpy().ravel() for value in state.values() if value.is_floating_point()])


# ---- Clipping


def norm_bounded_mean(before: np.ndarray, points: np.ndarray, max_norm: float, shares: np.ndarray) -> np.ndarray:
    changes = points - before
    clipped = [change * min(1.0, max_norm / np.linalg.norm(change)) for change in changes]
    return before + shares @ np.stack(clipped) / shares.sum()


def centered_clipping(
    momenta: np.ndarray, center: np.ndarray, radius: float | None, num_iterations: int
) -> np.ndarray:
    """Algorithm 2 of Karimireddy et al. Without a radius, it is the median distance."""
    for _ in range(num_iterations):
        distances = np.linalg.norm(momenta - center, axis=1)
        limit = np.median(distances) if radius is None else radius
        steps = [(m - center) * min(1.0, limit / d) for m, d in zip(momenta, distances, strict=True)]
        center = center + np.mean(steps, axis=0)
    return center


def fltrust(before: np.ndarray, points: np.ndarray, server_point: np.ndarray) -> np.ndarray:
    """Algorithm 2 of Cao et al."""
    own = server_point - before
    total, trust = np.zeros_like(before), 0.0
    for point in points:
        change = point - before
        score = max(0.0, change @ own / (np.linalg.norm(change) * np.linalg.norm(own)))
        total += score * change * np.linalg.norm(own) / np.linalg.norm(change)
        trust += score
    return before if trust == 0 else before + total / trust
