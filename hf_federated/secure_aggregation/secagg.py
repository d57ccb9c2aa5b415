"""`SecAgg`: secure aggregation with pairwise masks."""

from __future__ import annotations

from typing import ClassVar

from ..utils.arguments import require_count
from .base import SecureAggregation
from .masks import ClientMasks, ServerMasks
from .pairwise_masks import PairwiseMasks, PairwiseUnmasking
from .thresholds import threshold_for


class SecAgg(SecureAggregation):
    """
    SecAgg: each client masks its update with its own mask and with one mask for each other client.

    [Practical Secure Aggregation for Privacy-Preserving Machine Learning](https://eprint.iacr.org/2017/281) (Bonawitz
    et al., CCS 2017), with the signatures of section 6 against a dishonest server.

    The masked update of client `u` is `y_u = x_u + PRG(b_u) ± Σ_v PRG(s_uv) mod 2³²`. The pairwise masks cancel in the
    sum. Shares of `b_u` and of the key behind `s_uv` are with the other clients (Shamir secret sharing). `threshold`
    survivors give the server the shares of `b_u` of the clients in the sum, and of the keys of the lost clients, never
    both of one client.

    A client trains before the protocol begins, so a client that is lost during the training costs nothing. A client
    takes part in one sum of a round only, because the difference of two sums could be one update.

    Args:
        max_weight, clip, bits, min_survivors, pins, masks: See [`SecureAggregation`].
        threshold (`int`, *optional*): Number of survivors that the server needs. Defaults to `⌊2m/3⌋ + 1` of `m`
            clients.
        num_colluding (`int`, *optional*, defaults to `0`): Number of clients `c` that may work with a dishonest
            server. The threshold must be above `(m + c) / 2`, so that two different sets of survivors cannot both be
            signed, and at least `c + 2`, so that a sum has the updates of two other clients.

    Requirements:
        An aggregation whose result follows from sums, `cryptography` (extra `network`), and at least `min_survivors`
        clients in a round. On several machines, certificates and their fingerprints.

    Example:

    ```python
    >>> from hf_federated import SecAgg

    >>> SecAgg(max_weight=2000, num_colluding=2).threshold_of(10)
    7
    ```
    """

    name: ClassVar[str] = "secagg"
    title: ClassVar[str] = "SecAgg"

    def __init__(
        self,
        max_weight: float | None = None,
        threshold: int | None = None,
        num_colluding: int = 0,
        clip: float | dict[str, float] = 1.0,
        bits: int = 32,
        min_survivors: int = 3,
        pins: str = "required",
        masks: bool = True,
    ) -> None:
        super().__init__(max_weight, clip, bits, min_survivors, pins, masks)
        if threshold is not None:
            require_count("threshold", threshold, 2)
        require_count("num_colluding", num_colluding, 0)
        self.threshold, self.num_colluding = threshold, num_colluding

    def threshold_of(self, num_clients: int) -> int:
        return threshold_for(num_clients, self.threshold, self.num_colluding)

    def client_masks(self) -> ClientMasks:
        return PairwiseMasks()

    def server_masks(self) -> ServerMasks:
        return PairwiseUnmasking()
