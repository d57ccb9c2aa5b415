"""The number of neighbors, compared with exact probabilities, and the graph of the neighbors."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from fractions import Fraction

import pytest

from hf_federated.security.neighbors import choose_neighbors, neighbors_of


NUM_CLIENTS = (50, 100, 300, 1000, 3000, 10_000)

# k and t for each share of corrupt clients and share of lost clients.
CHOICES = {
    (0.1, 0.1): [(12, 7), (20, 11), (36, 21), (46, 26), (50, 29), (54, 30)],
    (0.2, 0.05): [(14, 11), (24, 19), (42, 30), (52, 37), (58, 41), (60, 42)],
    (1 / 3, 0.1): [(22, 17), (40, 31), (76, 55), (102, 72), (114, 80), (126, 88)],
    (0.05, 0.3): [(30, 16), (58, 30), (114, 58), (172, 87), (208, 105), (232, 117)],
}


def tail(total: int, marked: int, drawn: int, at_least: int) -> Fraction:
    ways = sum(math.comb(marked, x) * math.comb(total - marked, drawn - x) for x in range(at_least, drawn + 1))
    return Fraction(ways, math.comb(total, drawn))


def is_private(n: int, corrupt: int, k: int, t: int) -> bool:
    return n * tail(n - 1, corrupt, k, t) <= Fraction(1, 2**40)


def is_reliable(n: int, lost: int, k: int, t: int) -> bool:
    # The n - lost surviving clients are marked among the n - 1 others of a lost client.
    return lost == 0 or n * (1 - tail(n - 1, n - lost, k, t)) <= Fraction(1, 2**20)


def is_connected(n: int, removed: int, k: int) -> bool:
    if removed < k:
        return True
    return Fraction(n**2, 2) * Fraction(math.comb(n - k, removed - k), math.comb(n, removed)) <= Fraction(1, 2**40)


@pytest.mark.parametrize("shares", CHOICES, ids=str)
def test_choices_for_up_to_ten_thousand_clients(shares):
    assert [choose_neighbors(num_clients, *shares) for num_clients in NUM_CLIENTS] == CHOICES[shares]


@pytest.mark.parametrize("num_clients", [20, 65, 100, 300])
@pytest.mark.parametrize("shares", [*CHOICES, (0, 0), (0.01, 0.01), (0.4, 0.0), (0.0, 0.4)], ids=str)
def test_choice_is_the_smallest_that_satisfies_all_exact_conditions(shares, num_clients):
    corrupt = math.floor(Fraction(shares[0]).limit_denominator(100) * num_clients)
    lost = math.ceil(Fraction(shares[1]).limit_denominator(100) * num_clients)
    k, t = choose_neighbors(num_clients, *shares)
    assert t == next(t for t in range(k // 2 + 1, k + 1) if is_private(num_clients, corrupt, k, t))
    assert is_reliable(num_clients, lost, k, t)
    assert k == num_clients - 1 or is_connected(num_clients, corrupt + lost, k)
    for smaller in range(2, k, 2):
        assert not is_connected(num_clients, corrupt + lost, smaller) or not any(
            is_private(num_clients, corrupt, smaller, t) and is_reliable(num_clients, lost, smaller, t)
            for t in range(smaller // 2 + 1, smaller + 1)
        )


def test_neighbors_are_added_if_the_graph_could_fall_apart():
    """Without corrupt neighbors to fear, 10 of 50 clients would do, but two gaps of 5 have a probability of 1e-7."""
    assert is_private(50, 5, 10, 6) and is_reliable(50, 5, 10, 6)
    assert not is_connected(50, 10, 10)
    assert choose_neighbors(50, 0.1, 0.1) == (12, 7)


def test_more_bits_need_more_neighbors():
    usual = choose_neighbors(1000, 0.1, 0.1)
    assert choose_neighbors(1000, 0.1, 0.1, privacy_bits=80) > usual
    assert choose_neighbors(1000, 0.1, 0.1, failure_bits=40) > usual


def test_shares_that_float64_rounds_down_are_whole_numbers_of_clients():
    assert math.floor(0.29 * 100) == 28
    assert choose_neighbors(100, 0.29, 0) == choose_neighbors(100, 0.299, 0) != choose_neighbors(100, 0.28, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 0.1, 0.1), "num_clients=1"),
        ((100, -0.1, 0.1), "corrupt_share=-0.1"),
        ((100, 1.0, 0.1), "corrupt_share=1.0"),
        ((100, 0.1, 1.0), "lost_share=1.0"),
        ((100, 0.1, 0.6), "even 99 neighbors are not enough"),
        ((100, 0.6, 0.4), "even 99 neighbors are not enough"),
    ],
)
def test_impossible_shares_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_neighbors(*arguments)


def components(graph: dict[str, tuple[str, ...]], removed: set[str]) -> int:
    """The number of connected parts that remain when clients are removed."""
    remaining, count = set(graph) - removed, 0
    while remaining:
        count, reached = count + 1, [remaining.pop()]
        while reached:
            found = remaining & set(graph[reached.pop()])
            remaining -= found
            reached += found
    return count


@pytest.mark.parametrize(("num_clients", "k"), [(1, 2), (2, 1), (5, 2), (5, 4), (6, 5), (6, 99), (50, 10), (51, 12)])
def test_graph_is_regular_symmetric_and_connected(num_clients, k):
    clients = [f"client {number}" for number in range(num_clients)]
    graph = neighbors_of(clients, k, os.urandom(32))
    assert graph.keys() == set(clients)
    for client, neighbors in graph.items():
        assert len(set(neighbors)) == len(neighbors) == min(k, num_clients - 1)
        assert neighbors == tuple(sorted(neighbors))
        assert client not in neighbors
        assert all(client in graph[neighbor] for neighbor in neighbors)
    assert components(graph, set()) == 1


def test_graph_does_not_depend_on_the_order_of_clients_and_follows_from_the_digest():
    clients, digest = ["south", "north", "œst", "east", "center"], bytes(range(32))
    graph = neighbors_of(clients, 2, digest)
    assert graph == neighbors_of(clients[::-1], 2, digest)
    prefix = b"hf-federated neighbors 1\0" + b"\0\0\0\x20" + digest
    ring = sorted(clients, key=lambda client: hashlib.sha256(prefix + client.encode()).digest())
    assert all(set(graph[ring[i]]) == {ring[i - 1], ring[(i + 1) % 5]} for i in range(5))
    others = [neighbors_of(clients, 2, bytes([number]) * 32) for number in range(20)]
    assert len({tuple(sorted(other.items())) for other in others}) > 5


def test_each_pair_is_connected_equally_often():
    """The order is random: 10 clients with 4 neighbors connect 4 / 9 of the pairs, within six standard deviations."""
    clients, num_graphs = [str(number) for number in range(10)], 900
    counts = dict.fromkeys(itertools.combinations(clients, 2), 0)
    for number in range(num_graphs):
        graph = neighbors_of(clients, 4, number.to_bytes(32, "big"))
        for pair in counts:
            counts[pair] += pair[0] in graph[pair[1]]
    deviation = (num_graphs * 4 / 9 * 5 / 9) ** 0.5
    assert all(abs(count - num_graphs * 4 / 9) < 6 * deviation for count in counts.values())


def test_graph_falls_apart_only_if_two_runs_of_half_the_neighbors_are_removed():
    clients, k = [str(number) for number in range(10)], 4
    graph = neighbors_of(clients, k, bytes(32))
    prefix = b"hf-federated neighbors 1\0" + b"\0\0\0\x20" + bytes(32)
    ring = sorted(clients, key=lambda client: hashlib.sha256(prefix + client.encode()).digest())
    for size in range(9):
        for removed in itertools.combinations(range(10), size):
            kept = [number for number in range(10) if number not in removed]
            gaps = [(after - before - 1) % 10 for before, after in zip(kept, kept[1:] + kept[:1], strict=True)]
            num_runs = sum(gap >= k // 2 for gap in gaps)
            assert components(graph, {ring[number] for number in removed}) == max(1, num_runs)


@pytest.mark.parametrize(
    ("clients", "k", "message"),
    [
        (["a", "b", "a"], 2, r"The clients \['a'\] occur more than once"),
        (["a", "b", "c", "d", "e"], 3, "k=3 is not allowed for 5 clients. Set k to an even number or to 4"),
        (["a", "b", "c"], 0, "k=0 is not allowed"),
    ],
)
def test_impossible_graphs_are_refused(clients, k, message):
    with pytest.raises(ValueError, match=message):
        neighbors_of(clients, k, bytes(32))
