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
