"""NormBoundedMean: the mean of the updates, whose norms are limited on the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..methods import UpdateCollection
from ..utils.arguments import require
from ..utils.robust_statistics import median
from ..utils.weighted_mean import State
from .lora_factors import find_pairs
from .robust import ClippedMean
from .update_statistics import clipping_scales, combine, squared_norms


class NormBoundedMean(ClippedMean):
    """
    NormBoundedMean: the mean of the updates, whose norms are limited on the server.

    [Can You Really Backdoor Federated Learning?](https://arxiv.org/abs/1911.07963) (Sun et al., 2019), section 5,
    norm thresholding. The noise of the paper's weak differential privacy is not added.

    `x ← x + Σ_i w_i Δ_i · min(1, M / ‖Δ_i‖₂) / Σ_i w_i` with the changes `Δ_i = x_i − x`. One client moves the global
    state by at most its share of `M`.

    With a fixed `max_norm`, the server keeps only a sum. Without `max_norm`, `M` is the median of the norms of a
    round, for which the server keeps all updates of the round in a temporary file. Integer tensors keep their global
    values with a sum, and are element-wise lower medians otherwise.

    For LoRA modules whose factors are both trained, the norms are norms of the changes of `B A`, computed from the
    factors. The mean of the products is factored again to rank `r` by a truncated singular value decomposition, for
    which the server keeps the updates of the round in a temporary file, also with a fixed `max_norm`. The scale of a
    LoRA module is equal for all clients; the norms leave it out.

    | paper | here |
    |---|---|
    | `M` | `max_norm` |
    | `Δw^k` | `Δ_i` |

    Args:
        max_norm (`float`, *optional*):
            Largest norm `M` of a change. Defaults to the median norm of each round.
        weighting (`str`, *optional*, defaults to `"uniform"`):
            Weight of an update, as in [`Aggregation`]. A hostile client can report a large number of examples.
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, the mean becomes the global state.
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
        Few clients of a cohort are hostile: the mean moves by up to `f / n · M`, in every round. Without `max_norm`,
        fewer than half of the clients are hostile. With `weighting="examples"`, the share of the weight replaces
        `f / n`. A client announces its weight, up to `max_examples_per_client` of [`FederatedConfig`].

    Relations:
        - [`ClipUpdate`] limits the norm on the client, which a hostile client can leave out.
        - [`CenteredClipping`] limits the distance to the previous change, which a constant direction cannot exploit.
        - With a large `max_norm`, the result is the mean, as with [`FedAvg`] and the same `weighting`.

    Example:

    ```python
    >>> from hf_federated import NormBoundedMean

    >>> NormBoundedMean(max_norm=3.0)
    NormBoundedMean(max_norm=3.0)
    ```
    """

    name: ClassVar[str] = "norm_bounded_mean"

    def __init__(
        self,
        max_norm: float | None = None,
        weighting: str = "uniform",
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
    ) -> None:
        super().__init__(server_optimizer, server_lr, server_kwargs, max_memory_mb, weighting)
        require("max_norm", max_norm, max_norm is None or max_norm > 0, "positive")
        self.max_norm = max_norm

    def limit(self, state: State) -> float | None:
        return None if find_pairs(state) else self.max_norm

    def estimate(self, updates: UpdateCollection) -> State:
        norms = squared_norms(updates).sqrt()
        largest = float(median(norms)) if self.max_norm is None else self.max_norm
        weights = torch.tensor(list(updates.weights.values()), dtype=torch.float64)
        return combine(updates, (clipping_scales(norms, largest) * weights / weights.sum()).tolist())
