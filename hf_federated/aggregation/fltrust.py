"""FLTrust: the server trains on its own examples and trusts updates that point in the same direction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..messages import ClientUpdate
from ..methods import UpdateCollection
from ..utils.weighted_mean import State
from .robust import RobustAggregation
from .update_statistics import combine, products_with, rounded, squared_norm, squared_norms


class FLTrust(RobustAggregation):
    """
    FLTrust: the server trains on its own examples and trusts updates that point in the same direction.

    [FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping](https://arxiv.org/abs/2012.13995) (Cao et
    al., NDSS 2021), algorithm 2.

    In each round, the server trains the global model on its own examples, with the settings of the clients and a new
    optimizer. With the changes `g_i` of the clients and `g_0` of the server, the trust in a client is
    `TS_i = max(cos(g_i, g_0), 0)`, and

    `x ← x + Σ_i TS_i · (‖g_0‖ / ‖g_i‖) g_i / Σ_i TS_i`.

    Without a trusted client, the round does not change the global state. The server's own change is not part of the
    sum. The server trains before the clients, and needs as much time as a client with the same number of examples.

    For LoRA modules whose factors are both trained, norms and cosines are those of the changes of `B A`, computed
    from the factors. The weighted sum of the products is factored again to rank `r` by a truncated singular value
    decomposition. The scale of a LoRA module is equal for all clients and cancels within the module.

    | paper | here |
    |---|---|
    | root dataset `D_0` | `server_dataset` of [`FederatedTrainer`] |
    | `α`, global learning rate | `server_lr` with `server_optimizer="sgd"` |
    | `R_l`, `b`, `β` | the local training of [`FederatedConfig`] and `TrainingArguments` |

    Args:
        server_optimizer (`str`, *optional*):
            Name of a server optimizer, as in [`FedOpt`]. By default, the sum becomes the global state.
        server_lr (`float`, *optional*, defaults to `1.0`):
            Learning rate of the server optimizer.
        server_kwargs (`dict`, *optional*):
            Further arguments of the server optimizer by their names in [`FedOpt`], such as `server_momentum`.
        max_memory_mb (`float`, *optional*, defaults to `256`):
            Memory for the values of all clients that the server compares at a time, in MB.

    Raises:
        ValueError: If an argument is unknown or out of range, if the trainer has no `server_dataset`, or if a server
            optimizer is combined with LoRA modules whose factors are both trained.

    Requirements:
        The server has labeled examples of the task (`server_dataset`), about 100 in the paper, from a distribution
        close to that of the clients. Any number of clients may be hostile. The server holds all updates of a round in
        a temporary file and sees every update, so secure aggregation is not possible. The examples of the server
        decide the weights: the numbers of examples that clients announce have no influence.

    Relations:
        - All other robust methods need a majority of honest clients and no examples on the server.

    Example:

    ```python
    >>> from hf_federated import FederatedConfig, FLTrust

    >>> FederatedConfig(aggregation="fltrust").aggregation
    'fltrust'
    >>> FLTrust.trains_on_server
    True
    ```
    """

    name: ClassVar[str] = "fltrust"
    trains_on_server: ClassVar[bool] = True

    def __init__(
        self,
        server_optimizer: str | None = None,
        server_lr: float = 1.0,
        server_kwargs: Mapping[str, Any] | None = None,
        max_memory_mb: float = 256,
    ) -> None:
        super().__init__(server_optimizer, server_lr, server_kwargs, max_memory_mb)
        self._server_state: State = {}

    def on_server_update(self, update: ClientUpdate) -> None:
        self._server_state = update.state

    def estimate(self, updates: UpdateCollection) -> State:
        own_square = squared_norm(self._server_state, updates.reference)
        weights = trust_weights(squared_norms(updates), products_with(updates, self._server_state), own_square)
        self._server_state = {}
        return combine(updates, weights.tolist())


def trust_weights(squares: torch.Tensor, products: torch.Tensor, own_square: float) -> torch.Tensor:
    """
    Weights of the clients' changes: `TS_i · ‖g_0‖ / ‖g_i‖ / Σ_j TS_j`, or 0 without a trusted client.

    Args:
        squares (`torch.Tensor` of shape `(num_clients,)`, float64): Squared norms of the clients' changes.
        products (`torch.Tensor` of shape `(num_clients,)`, float64): Inner products with the change of the server.
        own_square (`float`): Squared norm of the change of the server.
    """
    norms, own_norm = squares.sqrt(), own_square**0.5
    # A change of 0 has no direction, and a change whose square overflows is not trusted.
    is_usable = (norms > 0) & norms.isfinite() & products.isfinite()
    trust = torch.where(is_usable, products / (norms * own_norm), 0.0).nan_to_num(nan=0.0).clamp(min=0)
    total = trust.sum()
    if total == 0:
        return torch.zeros_like(squares)
    return rounded(torch.where(is_usable, trust * own_norm / norms, 0.0) / total)
