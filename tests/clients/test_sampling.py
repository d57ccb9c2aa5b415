"""Sampling of clients: uniform, without replacement, and a function of seed and round only."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import numpy as np
import pytest
import torch

from hf_federated.clients import ClientSampler, client_seed


CLIENTS = [f"client {i}" for i in range(20)]


def test_int_samples_this_number_of_clients_without_replacement():
    sampler = ClientSampler(CLIENTS, 7, seed=0)
    for round in range(50):
        cohort = sampler(round)
        assert len(cohort) == len(set(cohort)) == 7
        assert set(cohort) <= set(CLIENTS)
        assert list(cohort) == sorted(cohort)


@pytest.mark.parametrize(
    ("fraction", "total", "expected"),
    [(1.0, 20, 20), (0.5, 20, 10), (0.1, 20, 2), (0.07, 20, 1), (0.34, 3, 1), (0.6, 3, 2)],
)
def test_fraction_is_rounded_to_the_nearest_number_of_clients(fraction, total, expected):
    assert len(ClientSampler(CLIENTS[:total], fraction, seed=0)(0)) == expected


def test_float_one_samples_all_clients_and_int_one_samples_one_client():
    assert ClientSampler(CLIENTS, 1.0, seed=0)(3) == tuple(sorted(CLIENTS))
    assert len(ClientSampler(CLIENTS, 1, seed=0)(3)) == 1


def test_rounds_and_seeds_sample_differently():
    cohorts = {
        (seed, round): ClientSampler(CLIENTS, 5, seed)(round) for seed in (0, 1, -1, 2**40) for round in range(5)
    }
    assert len(set(cohorts.values())) == len(cohorts)


def test_cohort_of_a_round_does_not_depend_on_earlier_calls():
    sampler = ClientSampler(CLIENTS, 5, seed=3)
    in_order = [sampler(round) for round in range(10)]
    assert [ClientSampler(CLIENTS, 5, seed=3)(round) for round in reversed(range(10))] == in_order[::-1]


def test_cohort_does_not_depend_on_the_order_of_the_clients():
    assert ClientSampler(CLIENTS[::-1], 5, seed=3)(4) == ClientSampler(CLIENTS, 5, seed=3)(4)


def test_sampling_neither_reads_nor_changes_global_generators():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    cohort = ClientSampler(CLIENTS, 5, seed=3)(4)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert ClientSampler(CLIENTS, 5, seed=3)(4) == cohort


def test_all_clients_are_sampled_with_equal_frequency():
    sampler = ClientSampler(CLIENTS, 5, seed=0)
    counts = Counter(client_id for round in range(2000) for client_id in sampler(round))
    expected, deviation = 2000 * 5 / 20, (2000 * 0.25 * 0.75) ** 0.5
    assert all(abs(counts[client_id] - expected) < 5 * deviation for client_id in CLIENTS)


def test_fraction_that_rounds_to_zero_clients_is_refused():
    with pytest.raises(ValueError, match="=0.01 rounds to 0 of 20 clients.*at least 0.05 .*a number of clients"):
        ClientSampler(CLIENTS, 0.01, seed=0)


def test_more_clients_per_round_than_clients_is_refused():
    with pytest.raises(ValueError, match="clients_per_round=21, but the federation has 20 clients. .* at most 20"):
        ClientSampler(CLIENTS, 21, seed=0)


# ---- Seeds of clients


def test_client_seeds_differ_between_runs_clients_and_rounds():
    seeds = {client_seed(seed, client_id, round) for seed in range(3) for client_id in CLIENTS for round in range(20)}
    assert len(seeds) == 3 * 20 * 20
    assert all(0 <= seed < 2**32 for seed in seeds)  # the range of NumPy seeds


def test_client_seed_separates_its_inputs():
    """Concatenating seed, client id and round without separators would give equal seeds here."""
    assert client_seed(1, "1", 1) != client_seed(11, "", 1) != client_seed(1, "11", 1)
    assert len({client_seed(1, "23", 4), client_seed(12, "3", 4), client_seed(1, "2", 34)}) == 3


def test_client_seed_is_the_same_in_every_process():
    """Python's `hash` differs between processes, so the seed must not use it."""
    digest = hashlib.sha256(b"7\x00north\x003").digest()
    assert client_seed(7, "north", 3) == int.from_bytes(digest[:4], "little")
