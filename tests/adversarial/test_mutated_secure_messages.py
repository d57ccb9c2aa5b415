"""Mutated messages of secure aggregation: a reply is a failure of its client, a request is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from mutations import mutate
from secure_clients import (
    COHORT,
    HOSTILE,
    MAX_WEIGHT,
    RoundFailedError,
    SecAgg,
    SecureEngine,
    SecureRounds,
    change_of,
)

from hf_federated.messages import Message
from hf_federated.messages.secure_aggregation import MaskedUpdate


# Largest error of the mean by the rounding.
ROUNDING = 1e-6
NUM_REQUESTS = 5


def mean_of(clients: set[str]) -> float:
    return sum(change_of(name) for name in clients) / len(clients)


def run_mutated(num_rounds: int, seed: int, every: float = 0.3) -> dict[str, int]:
    """Run rounds in which one reply of a client is mutated, or each of its replies. Return the numbers of outcomes."""
    draw = random.Random(seed)
    outcomes = {"exact": 0, "other update": 0, "failed": 0}
    chosen: list[Any] = [0, None, False]

    def spoil(request: Message, reply: Message) -> Any:
        chosen[0] += 1
        if chosen[1] is not None and chosen[0] != chosen[1]:
            return reply
        changed = mutate(reply, draw)
        masked = getattr(changed, "masked", None)
        if isinstance(changed, MaskedUpdate) and isinstance(masked, torch.Tensor):
            # A client may send any values. No other party knows them.
            chosen[2] |= masked.dtype == reply.masked.dtype and masked.shape == reply.masked.shape
        return changed

    engine = SecureEngine(COHORT, SecAgg(max_weight=MAX_WEIGHT), spoil)
    rounds = SecureRounds(engine, num_rounds=num_rounds)
    for round in range(num_rounds):
        chosen[:] = [0, None if draw.random() < every else draw.randrange(1, NUM_REQUESTS + 1), False]
        try:
            mean, lost, _ = rounds.run(round)
        except RoundFailedError as error:
            assert f"Round {round + 1}" in str(error) and len(str(error)) < 3000
            outcomes["failed"] += 1
            continue
        assert lost <= {HOSTILE}
        if chosen[2]:
            outcomes["other update"] += 1
            continue
        assert abs(mean - mean_of(set(COHORT) - lost)) < ROUNDING, (round, lost)
        outcomes["exact"] += 1
    return outcomes


@pytest.mark.parametrize(("num_rounds", "seed"), [(60, 1), pytest.param(4000, 49, marks=pytest.mark.slow)])
def test_mutated_reply_gives_an_exact_sum_or_fails_the_round(num_rounds, seed):
    outcomes = run_mutated(num_rounds, seed)
    assert outcomes["exact"] > num_rounds / 3, outcomes
