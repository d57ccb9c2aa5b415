"""Krum and multi-Krum: the updates that are closest to their neighbors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..methods import UpdateCollection
from ..utils.arguments import require
from ..utils.errors import RoundFailedError
from ..utils.weighted_mean import State
from .lora_factors import combined_factors, split_names
from .robust import RobustAggregation, check_num_hostile, count_hostile
from .update_statistics import combine, gram_matrix, squared_distances


class Krum(RobustAggregation):
    """
    Krum: the update that is closest to its neighbors, or with multi-Krum the mean of several such updates.

    [Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent](https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html)
    (Blanchard et al., NeurIPS 2017), section 4 and, for multi-Krum, section 6.

    The score of a client is the sum of the squared distances to its `n − f − 2` nearest other clients. The server
    selects the `m` clients with the lowest scores and averages their updates. If scores are equal, the client whose id
    sorts first is selected. Integer tensors are element-wise lower medians of all clients.

    For LoRA modules whose factors are both trained, distances are distances of the products `B A`, computed from
    the factors. The product of the selected client, or the mean of several products, is factored again to rank `r` by
    a truncated singular value decomposition. The factors of a client may be of any size, even if their product is
    close to the products of other clients. The scale of a LoRA module is equal for all clients; the distances leave it
    out.

    | paper | here |
    |---|---|
    | `n` | updates of the round |
    | `f` | `num_hostile` |
    | `m` | `num_selected` |

    Args:
        num_hostile (`int` or `float`, *optional*, defaults to `0.2`):
            Number of hostile clients of a cohort that the algorithm tolerates. A count, or a share below 0.5, which is
            rounded up. If updates of a round are rejected, a share is limited to what the remaining updates allow.
        num_selected (`int`, *optional*, defaults to `1`):
            Number of selected clients, at most the number of clients minus `num_hostile`. 1 is Krum, more is
            multi-Krum.
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, the selected update becomes the global state.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_kwargs (`dict`, *optional*):
            Further arguments of the server optimizer by their names in [`FedOpt`], such as `server_momentum`.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for the values of all clients that the server compares at a time, in MB.

    Raises:
        ValueError: If an argument is unknown or out of range, if a cohort has fewer than `2f + 3` or `f + m` clients,
            or if a server optimizer is combined with LoRA modules whose factors are both trained.
        RoundFailedError: If a round has fewer than `2f + 3` or `f + m` updates.

    Requirements:
        At most `num_hostile` clients of a cohort are hostile, and the honest clients have similar data: the model of
        one client replaces the global model. The server holds all updates of a round in a temporary file and sees
        every update, so secure aggregation is not possible. All updates have equal weight: the numbers of examples
        that clients announce have no influence.

    Relations:
        - [`GeometricMedian`] uses all updates, so it loses less if clients differ.
        - With `num_hostile=0` and all clients selected, the result is the mean, as with [`FedAvg`] and
          `weighting="uniform"`.

    Example:

    ```python
    >>> from hf_federated import Krum

    >>> Krum(num_hostile=2, num_selected=5)
    Krum(num_hostile=2, num_selected=5)
    ```
    """

    name: ClassVar[str] = "krum"

    def __init__(
        self,
        num_hostile: float = 0.2,
        num_selected: int = 1,
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
    ) -> None:
        super().__init__(server_optimizer, server_lr, server_kwargs, max_memory_mb)
        check_num_hostile(num_hostile)
        require("num_selected", num_selected, num_selected >= 1, "at least 1")
        self.num_hostile = num_hostile
        self.num_selected = num_selected

    def _count_hostile(self, num_clients: int) -> int:
        """Return `f`. A share is limited to what 2f + 3 updates allow, so that a rejected update fails no round."""
        num_hostile = count_hostile(self.num_hostile, num_clients)
        return num_hostile if isinstance(self.num_hostile, int) else min(num_hostile, max((num_clients - 3) // 2, 0))

    def check_cohort(self, num_clients: int, error: type[Exception]) -> None:
        is_round = error is RoundFailedError
        num_hostile = self._count_hostile(num_clients) if is_round else count_hostile(self.num_hostile, num_clients)
        for needed, condition in (
            (2 * num_hostile + 3, f"num_hostile={self.num_hostile} of 'krum' needs 2f + 3"),
            (num_hostile + self.num_selected, f"num_selected={self.num_selected} of 'krum' needs f + m"),
        ):
            if num_clients < needed:
                raise error(
                    f"{condition} = {needed} updates, but there are {num_clients}. Lower the argument, or raise "
                    "`clients_per_round` and `min_clients`, or `buffer_size` of the collector."
                )

    def estimate(self, updates: UpdateCollection) -> State:
        scores = krum_scores(squared_distances(gram_matrix(updates)), self._count_hostile(len(updates)))
        selected = torch.sort(scores, stable=True).indices[: self.num_selected]
        coefficients = torch.zeros(len(updates), dtype=torch.float64)
        coefficients[selected] = 1 / self.num_selected
        # The distances do not contain integer tensors, so a selected client could choose them.
        integers = {name: updates.median_of_integers(name) for name in updates.other_names}
        result = combine(updates, coefficients.tolist()) | integers
        if self.num_selected == 1:
            for pair in split_names(updates.reference)[1]:
                # A huge factor A with a tiny factor B has the product of honest factors, but breaks their training.
                factors = combined_factors(updates, pair, {updates.client_ids[int(selected[0])]: 1.0})
                result |= {name: value.to(result[name]) for name, value in factors.items()}
        return result


def krum_scores(distances: torch.Tensor, num_hostile: int) -> torch.Tensor:
    """
    Score of each client: the sum of the squared distances to its `n − f − 2` nearest other clients.

    Args:
        distances (`torch.Tensor` of shape `(num_clients, num_clients)`): Squared distances.
        num_hostile (`int`): `f`.

    Returns:
        `torch.Tensor` of shape `(num_clients,)`: The scores.
    """
    num_clients = len(distances)
    others = distances[~torch.eye(num_clients, dtype=torch.bool)].view(num_clients, num_clients - 1)
    return others.sort(1).values[:, : num_clients - num_hostile - 2].sum(1)
