"""`LightSecAgg`: secure aggregation with coded masks, whose sum is decoded once."""

from __future__ import annotations

from typing import ClassVar

from ..security.prime_field import PRIME
from ..utils.arguments import require_count
from .base import SecureAggregation
from .coded_masks import CodedMasks, CodedUnmasking
from .masks import ClientMasks, ServerMasks
from .thresholds import threshold_for


class LightSecAgg(SecureAggregation):
    """
    LightSecAgg: each client masks its update with its own mask, and the server decodes the sum of the masks.

    [LightSecAgg: a Lightweight and Versatile Design for Secure Aggregation in Federated
    Learning](https://arxiv.org/abs/2109.14236) (So et al., MLSys 2022), algorithm 1, over the prime field of
    p = 2³¹ - 1.

    A client cuts its mask into `U - T` pieces, appends `T` random pieces, and sends a coded share to each client. A
    survivor returns the sum of the survivors' shares. `U` of these sums give the sum of the masks. `T` clients
    together learn nothing about a mask. The signatures against a dishonest server are those of [`SecAgg`].

    The server decodes once for any number of lost clients. A client uploads `1 + N / (U - T)` times its update in a
    round of `N` clients, and holds `N / (U - T)` times its update in memory: one share of each client's mask. In one
    process, these are the shares of all clients, `N² / (U - T)` updates, and as much in the server's messages.

    A client that sends a wrong sum of shares makes the sum wrong. The server cannot name the client.

    Args:
        max_weight, clip, min_survivors, pins, masks: See [`SecureAggregation`].
        threshold (`int`, *optional*): Number of survivors that the server needs (`U` in the paper). At most
            `N - D` if `D` clients can be lost. Defaults to `⌊2m/3⌋ + 1` of `m` clients.
        num_private (`int`, *optional*): Number of clients that learn nothing about the update of another client, even
            with the server (`T` in the paper). Below `threshold`: a small difference makes shares large. Defaults to
            `⌊m/3⌋` of `m` clients.
        num_colluding (`int`, *optional*, defaults to `0`): Number of clients `c` that may work with a dishonest
            server, at most `num_private`. The threshold must be above `(m + c) / 2`, as for [`SecAgg`].
        bits (`int`, *optional*, defaults to `32`): Number of bits of a value on the wire. Only 32 is allowed.

    Requirements:
        Those of [`SecAgg`].

    Relations:
        In [`SecAgg`], the server computes one mask for each survivor, and for each pair of a lost client and a
        survivor. An upload is as large as the update. Choose LightSecAgg if many clients are lost, models are small
        and the network is fast.

    Example:

    ```python
    >>> from hf_federated.secure_aggregation import LightSecAgg

    >>> protocol = LightSecAgg(max_weight=2000)
    >>> protocol.threshold_of(10), protocol.num_private_of(10)
    (7, 3)
    ```
    """

    name: ClassVar[str] = "lightsecagg"
    title: ClassVar[str] = "LightSecAgg"

    def __init__(
        self,
        max_weight: float | None = None,
        threshold: int | None = None,
        num_private: int | None = None,
        num_colluding: int = 0,
        clip: float | dict[str, float] = 1.0,
        bits: int = 32,
        min_survivors: int = 3,
        pins: str = "required",
        masks: bool = True,
    ) -> None:
        super().__init__(max_weight, clip, bits, min_survivors, pins, masks)
        if bits != 32:
            raise ValueError(f"`bits` is {bits}; LightSecAgg allows 32 only. Leave it out, or use 'secagg'.")
        if threshold is not None:
            require_count("threshold", threshold, 2)
        if num_private is not None:
            require_count("num_private", num_private, 1)
        require_count("num_colluding", num_colluding, 0)
        if num_private is not None and num_colluding > num_private:
            raise ValueError(
                f"num_colluding={num_colluding} is above num_private={num_private}: more clients would work with the "
                "server than learn nothing. Raise `num_private` or lower `num_colluding`."
            )
        self.threshold, self.num_private, self.num_colluding = threshold, num_private, num_colluding

    @property
    def modulus(self) -> int:
        return PRIME

    def threshold_of(self, num_clients: int) -> int:
        threshold = threshold_for(num_clients, self.threshold, self.num_colluding)
        num_private = self.num_private_of(num_clients)
        if num_private >= threshold:
            raise ValueError(
                f"num_private={num_private} is not below threshold={threshold} of {num_clients} clients. Lower "
                "`num_private`, or raise `threshold`."
            )
        return threshold

    def num_private_of(self, num_clients: int) -> int:
        """
        Return the number of clients whose shares reveal nothing about a mask.

        Args:
            num_clients (`int`): Number of clients of a session.
        """
        return self.num_private or max(num_clients // 3, self.num_colluding, 1)

    def client_masks(self) -> ClientMasks:
        return CodedMasks(self.num_private_of)

    def server_masks(self) -> ServerMasks:
        return CodedUnmasking(self.num_private_of)
