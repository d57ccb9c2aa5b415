"""TrimmedMean: the mean of each parameter without the largest and the smallest values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..methods import UpdateCollection
from ..utils.robust_statistics import trimmed_mean
from ..utils.weighted_mean import State
from .robust import RobustAggregation, check_num_hostile, count_hostile
from .update_statistics import coordinate_wise


class TrimmedMean(RobustAggregation):
    """
    TrimmedMean: the mean of each parameter without the largest and the smallest values of the clients.

    [Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates](https://arxiv.org/abs/1803.01498) (Yin
    et al., ICML 2018), option II of algorithm 1.

    The server leaves out the `f` largest and the `f` smallest values of each parameter. For LoRA modules whose factors
    are both trained, it does this for the coordinates of the products `B A`, and factors the result again to rank
    `r` by a truncated singular value decomposition. The matrix of one module is in memory for this step. The scale of
    a LoRA module is equal for all clients and cancels.

    | paper | here |
    |---|---|
    | `β`, share of trimmed values at each end | `num_hostile`, as a share or a count `f` |
    | `m`, number of workers | updates of the round |
    | `η`, step size | `server_lr` with `server_optimizer="sgd"` |

    Args:
        num_hostile (`int` or `float`, *optional*, defaults to `0.2`):
            Number of hostile clients of a cohort that the algorithm tolerates. A count, or a share below 0.5, which is
            rounded up but stays below half of the clients.
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, the trimmed mean becomes the global state.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_kwargs (`dict`, *optional*):
            Further arguments of the server optimizer by their names in [`FedOpt`], such as `server_momentum`.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for the values of all clients that the server compares at a time, in MB.

    Raises:
        ValueError: If an argument is unknown or out of range, if a cohort has at most `2 · num_hostile` clients, or if
            a server optimizer is combined with LoRA modules whose factors are both trained.
        RoundFailedError: If a round has at most `2 · num_hostile` updates.

    Requirements:
        At most `num_hostile` clients of a cohort are hostile. The server holds all updates of a round in a temporary
        file and sees every update, so secure aggregation is not possible. All updates have equal weight: the numbers
        of examples that clients announce have no influence.

    Relations:
        - [`CoordinateMedian`] tolerates any minority.
        - With `num_hostile=0`, the result is the mean, as with [`FedAvg`] and `weighting="uniform"`.

    Example:

    ```python
    >>> from hf_federated import TrimmedMean

    >>> TrimmedMean(num_hostile=2)
    TrimmedMean(num_hostile=2)
    ```
    """

    name: ClassVar[str] = "trimmed_mean"

    def __init__(
        self,
        num_hostile: float = 0.2,
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
    ) -> None:
        super().__init__(server_optimizer, server_lr, server_kwargs, max_memory_mb)
        check_num_hostile(num_hostile)
        self.num_hostile = num_hostile

    def check_cohort(self, num_clients: int, error: type[Exception]) -> None:
        num_hostile = count_hostile(self.num_hostile, num_clients)
        if num_clients <= 2 * num_hostile:
            raise error(
                f"num_hostile={self.num_hostile} of 'trimmed_mean' needs at least {2 * num_hostile + 1} updates, but "
                f"there are {num_clients}. Lower `num_hostile`, or raise `clients_per_round` and `min_clients`, or "
                "`buffer_size` of the collector."
            )

    def estimate(self, updates: UpdateCollection) -> State:
        num_hostile = count_hostile(self.num_hostile, len(updates))
        return coordinate_wise(updates, lambda values: trimmed_mean(values, num_hostile))
