"""CoordinateMedian: the median of each parameter over the clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..methods import UpdateCollection
from ..utils.robust_statistics import median
from ..utils.weighted_mean import State
from .robust import RobustAggregation
from .update_statistics import coordinate_wise


class CoordinateMedian(RobustAggregation):
    """
    CoordinateMedian: the median of each parameter over the clients.

    [Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates](https://arxiv.org/abs/1803.01498) (Yin
    et al., ICML 2018), option I of algorithm 1.

    For an even number of clients, the median is the mean of the middle two values. For LoRA modules whose factors
    are both trained, the median is taken over the coordinates of the products `B A` and factored again to rank `r`
    by a truncated singular value decomposition. The matrix of one module is in memory for this step. The scale of a
    LoRA module is equal for all clients and cancels.

    | paper | here |
    |---|---|
    | `m`, number of workers | updates of the round |
    | `η`, step size | `server_lr` with `server_optimizer="sgd"` |
    | one gradient step | the local training of [`FederatedConfig`] |

    Args:
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, the median becomes the global state.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_kwargs (`dict`, *optional*):
            Further arguments of the server optimizer by their names in [`FedOpt`], such as `server_momentum`.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for the values of all clients that the server compares at a time, in MB.

    Raises:
        ValueError: If an argument is unknown or out of range, or if a server optimizer is combined with LoRA modules
            whose factors are both trained.

    Requirements:
        Fewer than half of the clients of a cohort are hostile. The server holds all updates of a round in a temporary
        file and sees every update, so secure aggregation is not possible. All updates have equal weight: the numbers
        of examples that clients announce have no influence.

    Relations:
        - [`TrimmedMean`] averages the middle values, which is more accurate if few clients are hostile.
        - [`GeometricMedian`] compares whole updates instead of single parameters.
        - With one or two clients, the result is the mean, as with [`FedAvg`] and `weighting="uniform"`.

    Example:

    ```python
    >>> from hf_federated import CoordinateMedian, FederatedConfig

    >>> FederatedConfig(aggregation="median").aggregation
    'median'
    >>> CoordinateMedian(server_optimizer="momentum", server_lr=0.5)
    CoordinateMedian(server_optimizer='momentum', server_lr=0.5)
    ```
    """

    name: ClassVar[str] = "median"

    def __init__(
        self,
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
    ) -> None:
        super().__init__(server_optimizer, server_lr, server_kwargs, max_memory_mb)

    def estimate(self, updates: UpdateCollection) -> State:
        return coordinate_wise(updates, median)
