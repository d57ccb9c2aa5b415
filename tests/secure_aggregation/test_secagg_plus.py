"""SecAgg+: clients share secrets with their neighbors only, and the sum stays exact."""

from __future__ import annotations

import random

import pytest
import torch
from secure_sessions import PHASES, Exchange, names, sum_of, updates

from hf_federated.secure_aggregation import SecAgg, SecAggPlus
from hf_federated.secure_aggregation.server_session import SessionFailedError


def test_up_to_64_clients_all_clients_are_neighbors():
    protocol, clients = SecAggPlus(threshold=40, num_colluding=3), names(64)
    assert protocol.threshold_of(64) == SecAgg(threshold=40, num_colluding=3).threshold_of(64)
    assert protocol.neighbors_of("client 05", clients, bytes(32)) == tuple(
        name for name in clients if name != "client 05"
    )


@pytest.mark.parametrize(("number", "num_neighbors", "threshold"), [(100, 20, 11), (1000, 46, 26)])
def test_neighbors_of_more_clients_are_mutual_and_follow_from_the_keys(number, num_neighbors, threshold):
    protocol, clients = SecAggPlus(), names(number)
    graph = {name: protocol.neighbors_of(name, clients, b"keys") for name in clients}
    assert {len(neighbors) for neighbors in graph.values()} == {num_neighbors}
    assert all(name in graph[other] for name, neighbors in graph.items() for other in neighbors)
    assert protocol.threshold_of(number) == threshold
    assert protocol.neighbors_of(clients[0], clients, b"other keys") != graph[clients[0]]


def test_threshold_of_few_clients_is_not_that_of_as_many_neighbors():
    """A client has 20 neighbors of 100 clients. A session of 21 clients needs more survivors."""
    assert SecAggPlus().threshold_of(21) == 15
    assert SecAggPlus().threshold_of(100) == 11


def test_sum_of_many_clients_is_exact_if_clients_are_lost_in_each_phase():
    rng, values = random.Random(0), updates(80)
    lost = {name: phase for name, phase in zip(rng.sample(names(80), 5), PHASES, strict=True)}
    exchange = Exchange(SecAggPlus(), values, lost)
    total = exchange.run()
    assert len(exchange.server.survivors) == 77
    assert torch.equal(total, sum_of([values[name] for name in exchange.server.survivors]))
    assert not exchange.refusals
    # A client receives envelopes of its neighbors only.
    assert len(exchange.server.submit("client 79").envelopes) < 79


def test_client_whose_neighbors_are_lost_fails_the_session():
    protocol, values = SecAggPlus(), updates(70)
    exchange = Exchange(protocol, values)
    exchange.advertise()
    victim = "client 03"
    replies = exchange.ask("shares", exchange.server.advertised, exchange.server.share_keys)
    exchange.server.add_shares(replies)
    neighbors = list(exchange.server.share_keys(victim).identities)
    lost = neighbors[: len(neighbors) - protocol.threshold_of(70) + 2]
    exchange.server.set_survivors({name: "lost" if name in lost else None for name in values})
    signatures = exchange.ask("signature", exchange.server.survivors, exchange.server.confirm)
    with pytest.raises(SessionFailedError, match="clients that have shares of client .* signed the survivors"):
        exchange.server.add_signatures(signatures)


def test_shares_that_no_number_of_neighbors_covers_are_refused():
    with pytest.raises(ValueError, match="even 99 neighbors are not enough"):
        SecAggPlus(corrupt_share=0.5, lost_share=0.5).threshold_of(100)
    with pytest.raises(ValueError, match="`corrupt_share` is 1.0; it must be at least 0 and below 1"):
        SecAggPlus(corrupt_share=1.0)
    with pytest.raises(ValueError, match="`lost_share` is -0.1; it must be at least 0 and below 1"):
        SecAggPlus(lost_share=-0.1)
