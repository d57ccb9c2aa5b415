"""
The neighbors of SecAgg+: with whom each of many clients shares masks and secrets, and how many neighbors it needs.

[Secure Single-Server Aggregation with (Poly)Logarithmic Overhead](https://eprint.iacr.org/2020/704) (Bell et al., CCS
2020), section 3: a client masks its vector with k neighbors instead of all clients. The graph is a Harary graph (each
client is connected to the k / 2 next clients in both directions of a ring) on a random order of the clients.

The numbers hold if the server and the corrupt clients follow the protocol and try to learn from what they receive, and
if the lost clients do not depend on the order. They do not cover a server that lies about the lost clients, or tries
several lists of clients and chooses one by its order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence


_ORDER_TAG = b"hf-federated neighbors 1\0"

# Products of shares and numbers of clients are integers up to the rounding of float64.
_ROUNDING = 1e-9


def choose_neighbors(
    num_clients: int, corrupt_share: float, lost_share: float, privacy_bits: int = 40, failure_bits: int = 20
) -> tuple[int, int]:
    """
    Choose the smallest number of neighbors k that hides the vectors but not the sum, and the threshold t of shares.

    With n clients, c = ⌊`corrupt_share` · n⌋ corrupt clients and l = ⌈`lost_share` · n⌉ lost clients:

    - t > k / 2.
    - No client has t corrupt neighbors: n · P[Hypergeometric(n - 1, c, k) ≥ t] ≤ 2^-`privacy_bits`.
    - A lost client has t surviving neighbors: n · P[Hypergeometric(n - 1, n - l, k) < t] ≤ 2^-`failure_bits`. The
      probability is not larger for a surviving client, which holds one more share of its secret.
    - The honest surviving clients remain connected, else the server learns the sums of two groups. A Harary graph
      falls apart only if two runs of k / 2 clients on the ring are corrupt or lost:
      n² / 2 · P[k given clients are among c + l random clients] ≤ 2^-`privacy_bits`.

    Hypergeometric(m, a, k) is the number of marked clients among k random clients of m, of which a are marked. The
    first three conditions are those of the paper. t is the smallest threshold for k.

    Args:
        num_clients (`int`): Number of clients of a round, at least 2.
        corrupt_share (`float`): Largest share of clients that collude with the server, from 0 to below 1.
        lost_share (`float`): Largest share of clients that are lost in the round, from 0 to below 1.
        privacy_bits (`int`, *optional*, defaults to `40`): The probability that the server learns more than one sum is
            at most 2^-`privacy_bits` for each condition.
        failure_bits (`int`, *optional*, defaults to `20`): The probability that the sum cannot be unmasked is at most
            2^-`failure_bits`.

    Returns:
        `tuple[int, int]`: k and t. k is even, or `num_clients - 1` if each client needs all other clients.

    Raises:
        ValueError: If the shares are not allowed, or not even all other clients are enough.

    Example:

    ```python
    >>> from hf_federated.security.neighbors import choose_neighbors

    >>> choose_neighbors(1000, corrupt_share=0.1, lost_share=0.1)
    (46, 26)
    ```
    """
    if num_clients < 2 or not 0 <= corrupt_share < 1 or not 0 <= lost_share < 1:
        raise ValueError(
            f"num_clients={num_clients}, corrupt_share={corrupt_share} and lost_share={lost_share} are not allowed."
            " Use at least 2 clients and shares from 0 to below 1."
        )
    num_corrupt = math.floor(corrupt_share * num_clients + _ROUNDING)
    num_lost = math.ceil(lost_share * num_clients - _ROUNDING)
    others, log_union = num_clients - 1, math.log(num_clients)
    log_privacy, log_failure = -privacy_bits * math.log(2), -failure_bits * math.log(2)
    for k in (*range(2, others, 2), others):
        if k < others and _log_disconnected(num_clients, num_corrupt + num_lost, k) > log_privacy:
            continue
        t = k // 2 + 1
        while t <= k and log_union + _log_tail(others, num_corrupt, k, t) > log_privacy:
            t += 1
        # Fewer than t neighbors survive if at least k - t + 1 of the other lost clients are neighbors.
        if t <= k and log_union + _log_tail(others, max(num_lost - 1, 0), k, k - t + 1) <= log_failure:
            return k, t
    raise ValueError(
        f"With {num_clients} clients, corrupt_share={corrupt_share} and lost_share={lost_share}, even {others}"
        " neighbors are not enough: the surviving clients are not a majority, or not more than the corrupt clients."
        " Use smaller shares or more clients."
    )


def neighbors_of(clients: Sequence[str], k: int, digest: bytes) -> dict[str, tuple[str, ...]]:
    """
    Connect each client with k neighbors. The graph is the same on each machine and in each order of `clients`.

    The order of the ring is that of SHA-256 over `digest` and the id of a client.

    Args:
        clients (`Sequence[str]`): The ids of the clients.
        k (`int`): Number of neighbors: even, or at least the number of other clients for all pairs.
        digest (`bytes`): A digest of new random values of all clients, such as the digest of their public keys.

    Returns:
        `dict[str, tuple[str, ...]]`: The sorted neighbors of each client. If a client is a neighbor of another
        client, the other client is its neighbor.

    Raises:
        ValueError: If a client occurs twice, or `k` is odd and smaller than the number of other clients, or below 1.
    """
    if len(set(clients)) < len(clients):
        repeated = sorted(client for client in set(clients) if list(clients).count(client) > 1)
        raise ValueError(f"The clients {repeated} occur more than once. Pass each client once.")
    others = len(clients) - 1
    if k < 1 or (k < others and k % 2):
        raise ValueError(f"k={k} is not allowed for {len(clients)} clients. Set k to an even number or to {others}.")
    ring = sorted(clients, key=lambda client: hashlib.sha256(_ORDER_TAG + _encode(digest, client)).digest())
    if k >= others:
        return {client: tuple(sorted(other for other in ring if other != client)) for client in ring}
    half, extended = k // 2, ring + ring[:k]
    graph = {}
    for start in range(len(ring)):
        window = extended[start : start + k + 1]
        graph[window[half]] = tuple(sorted(window[:half] + window[half + 1 :]))
    return graph


def _encode(digest: bytes, client: str) -> bytes:
    """Encode digest and id with the length of the digest, so that different pairs have different encodings."""
    return len(digest).to_bytes(4, "big") + digest + client.encode()


def _log_binomial(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_tail(total: int, marked: int, drawn: int, at_least: int) -> float:
    """Compute the logarithm of the probability that at least `at_least` of the drawn clients are marked."""
    first, last = max(at_least, drawn + marked - total, 0), min(marked, drawn)
    if first > last:
        return -math.inf
    terms = [_log_binomial(marked, x) + _log_binomial(total - marked, drawn - x) for x in range(first, last + 1)]
    largest = max(terms)
    return largest + math.log(math.fsum(math.exp(term - largest) for term in terms)) - _log_binomial(total, drawn)


def _log_disconnected(num_clients: int, num_removed: int, k: int) -> float:
    """Bound the logarithm of the probability that removing random clients disconnects a Harary graph."""
    if num_removed < k:
        return -math.inf
    log_all_removed = _log_binomial(num_clients - k, num_removed - k) - _log_binomial(num_clients, num_removed)
    return math.log(num_clients**2 / 2) + log_all_removed
