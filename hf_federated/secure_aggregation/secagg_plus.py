"""`SecAggPlus`: secure aggregation with pairwise masks of neighbors, for many clients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

from ..security.neighbors import choose_neighbors, neighbors_of
from ..utils.arguments import require
from .secagg import SecAgg


# Up to this number of clients, each client shares its secrets with all other clients.
MAX_ALL_PAIRS = 64


class SecAggPlus(SecAgg):
    """
    SecAgg+: each client masks its update with its own mask and with one mask for each of its neighbors.

    [Secure Single-Server Aggregation with (Poly)Logarithmic Overhead](https://eprint.iacr.org/2020/704) (Bell et al.,
    CCS 2020), the protocol of section 3.

    A graph connects each client with `k` neighbors, and `t` of them reveal a secret of the client. `k` and `t` follow
    from the number of clients, `corrupt_share` and `lost_share`
    ([`~hf_federated.security.neighbors.choose_neighbors`]): with 10 % corrupt and 10 % lost clients, `k` is 20 of
    100 clients, and 46 of 1000. The keys of all clients determine the graph. Up to 64 clients, all clients are
    neighbors, as in [`SecAgg`].

    Above 64 clients, the protocol protects against a server that follows the protocol and works with at most
    `corrupt_share` of the clients. It does not protect against a server that lies about the lost clients, or that
    tries several subsets of the known clients until the graph isolates a client. A server that controls many clients
    needs [`SecAgg`].

    Args:
        max_weight, clip, bits, min_survivors, pins, masks: See [`SecureAggregation`].
        threshold, num_colluding: See [`SecAgg`]. They apply up to 64 clients.
        corrupt_share (`float`, *optional*, defaults to `0.1`): Largest share of the clients that work with the server
            (γ in the paper), from 0 to below 1. It applies above 64 clients.
        lost_share (`float`, *optional*, defaults to `0.1`): Largest share of the clients that are lost in a round (δ
            in the paper), from 0 to below 1. With more lost clients, a round can fail. It applies above 64 clients.

    Requirements:
        Those of [`SecAgg`].

    Relations:
        [`SecAgg`] has all pairs of clients, so the time of a client grows with the number of clients. Choose SecAgg+
        for hundreds of clients and more.

    Example:

    ```python
    >>> from hf_federated.secure_aggregation import SecAggPlus

    >>> SecAggPlus(max_weight=2000).threshold_of(1000)
    26
    ```
    """

    name: ClassVar[str] = "secagg+"
    title: ClassVar[str] = "SecAgg+"

    def __init__(
        self,
        max_weight: float | None = None,
        threshold: int | None = None,
        num_colluding: int = 0,
        corrupt_share: float = 0.1,
        lost_share: float = 0.1,
        clip: float | dict[str, float] = 1.0,
        bits: int = 32,
        min_survivors: int = 3,
        pins: str = "required",
        masks: bool = True,
    ) -> None:
        super().__init__(max_weight, threshold, num_colluding, clip, bits, min_survivors, pins, masks)
        require("corrupt_share", corrupt_share, 0 <= corrupt_share < 1, "at least 0 and below 1")
        require("lost_share", lost_share, 0 <= lost_share < 1, "at least 0 and below 1")
        self.corrupt_share, self.lost_share = corrupt_share, lost_share

    def threshold_of(self, num_clients: int) -> int:
        if num_clients <= MAX_ALL_PAIRS:
            return super().threshold_of(num_clients)
        return _numbers(num_clients, self.corrupt_share, self.lost_share)[1]

    def neighbors_of(self, client_id: str, clients: Sequence[str], roster: bytes) -> tuple[str, ...]:
        if len(clients) <= MAX_ALL_PAIRS:
            return super().neighbors_of(client_id, clients, roster)
        num_neighbors, _ = _numbers(len(clients), self.corrupt_share, self.lost_share)
        return _graph(tuple(clients), num_neighbors, roster)[client_id]


@functools.lru_cache(maxsize=16)
def _numbers(num_clients: int, corrupt_share: float, lost_share: float) -> tuple[int, int]:
    return choose_neighbors(num_clients, corrupt_share, lost_share)


# Each client of a process asks for the same graph.
@functools.lru_cache(maxsize=1)
def _graph(clients: tuple[str, ...], num_neighbors: int, roster: bytes) -> dict[str, tuple[str, ...]]:
    return neighbors_of(clients, num_neighbors, roster)
