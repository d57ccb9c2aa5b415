"""FedProx: FedAvg whose clients are held near the global model.

Li et al., Federated Optimization in Heterogeneous Networks (MLSys 2020), equation 2. The paper's tolerance for partial
work (`γ`-inexactness) is what `local_epochs` and `min_clients` allow anyway; there is nothing to set here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import Fit
from .base import Aggregation, LocalHook, State


class FedProx(Aggregation):
    """
    Each client minimises `F_i(w) + (μ/2) ‖w − w_t‖²`, where `w_t` is the global state it received.

    The term enters as its gradient `μ (w − w_t)`, once per optimizer step and before clipping, so it works with any
    client optimizer and any `compute_loss`; the logged loss is the client's own, without the term.

    | paper | here |
    |---|---|
    | `μ` | `proximal_weight` |
    | `K`, devices a round | `clients_per_round` of [`FederatedConfig`] |

    Args:
        proximal_weight (`float`, *optional*, defaults to `0.01`):
            `μ`, not negative. With 0 it is [`FedAvg`] bit for bit.
        weighting (`str`, *optional*, defaults to `"examples"`):
            `"examples"`, `"tokens"` or `"uniform"`.

    Raises:
        ValueError: If `proximal_weight` is negative.

    Example:

    ```python
    >>> from hf_federated import FedProx

    >>> FedProx(proximal_weight=0.1)
    FedProx(proximal_weight=0.1)
    ```
    """

    name: ClassVar[str] = "fedprox"
    needs_gradients: ClassVar[bool] = True

    def __init__(self, proximal_weight: float = 0.01, weighting: str = "examples") -> None:
        super().__init__(weighting)
        if proximal_weight < 0:
            raise ValueError(
                f"`proximal_weight` is {proximal_weight}; the proximal term needs a weight of at least 0."
            )
        self.proximal_weight = proximal_weight

    def fit_settings(self) -> dict[str, Any]:
        return {"proximal_weight": self.proximal_weight}

    def local_hook(self, message: Fit, kept: dict[str, Any] | None) -> LocalHook | None:
        weight = message.settings["proximal_weight"]
        return ProximalHook(weight, message.state) if weight > 0 else None


class ProximalHook(LocalHook):
    """Adds `μ (w − w_t)` to the gradients."""

    def __init__(self, weight: float, anchor: State) -> None:
        self._weight = weight
        self._anchor = anchor

    @torch.no_grad()
    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        gradients: list[torch.Tensor] = []
        distances: list[torch.Tensor] = []
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                distances.append(parameter.detach() - self._anchor[name].to(parameter))
        if gradients:
            torch._foreach_add_(gradients, distances, alpha=self._weight)
