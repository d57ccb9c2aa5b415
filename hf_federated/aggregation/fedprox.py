"""FedProx: FedAvg with a proximal term that keeps clients near the global model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import Fit
from ..methods import ClientPart
from ..utils.arguments import require
from ..utils.weighted_mean import State
from .base import Aggregation


class ProximalPart(ClientPart):
    """Add `μ (w − w_t)` to the gradients. The message contains `μ` and `w_t`."""

    _weight = 0.0
    _anchor: State

    def receive(self, message: Fit) -> None:
        self._weight = message.settings["proximal_weight"]
        # A narrowed state converts a value each time it is read.
        self._anchor = dict(message.state)

    @property
    def changes_gradients(self) -> bool:
        return self._weight > 0

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


class FedProx(Aggregation):
    """
    FedProx: FedAvg with a proximal term in the loss of the clients.

    [Federated Optimization in Heterogeneous Networks](https://arxiv.org/abs/1812.06127) (Li et al., MLSys 2020),
    equation 2.

    Each client minimizes `F_i(w) + (μ/2) ‖w − w_t‖²`, where `w_t` is the global state that the client received.

    The client adds the gradient of the term, `μ (w − w_t)`, once per optimizer step and before gradient clipping. It
    works with any `compute_loss`. The logged loss is the loss of the client without the term. There is no argument for
    the partial work of the paper (`γ`-inexactness). `local_epochs` and `min_clients` of [`FederatedConfig`] allow it.

    | paper | here |
    |---|---|
    | `μ` | `proximal_weight`, or its alias `mu` |
    | `K`, devices per round | `clients_per_round` of [`FederatedConfig`] |

    Args:
        proximal_weight (`float`, *optional*, defaults to `0.01`):
            Weight `μ` of the proximal term, at least 0.
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].
        mu (`float`, *optional*):
            Alias of `proximal_weight`, with the symbol of the paper. Model cards and saved configurations contain
            `proximal_weight`.

    Raises:
        ValueError: If `proximal_weight` is negative, `weighting` is unknown, or `proximal_weight` and `mu` are both
            set.

    Requirements:
        The client optimizer keeps the gradients until its step. LOMO and AdaLomo do not.

    Relations:
        - [`FedAvg`] is identical bit for bit to `proximal_weight=0`.
        - [`FedNova`] supports the same proximal term.

    Example:

    ```python
    >>> from hf_federated import FedProx

    >>> FedProx(proximal_weight=0.1)
    FedProx(proximal_weight=0.1)
    >>> FedProx(mu=0.1)
    FedProx(proximal_weight=0.1)
    ```
    """

    name: ClassVar[str] = "fedprox"
    aliases: ClassVar[Mapping[str, str]] = {"mu": "proximal_weight"}
    needs_gradients: ClassVar[bool] = True
    client_part: ClassVar[type[ClientPart]] = ProximalPart

    def __init__(self, proximal_weight: float = 0.01, weighting: str = "examples", *, mu: float | None = None) -> None:
        super().__init__(weighting)
        if mu is not None:
            if proximal_weight != 0.01:
                raise ValueError(
                    f"`proximal_weight` is {proximal_weight} and its alias `mu` is {mu}. Set only one of them."
                )
            proximal_weight = mu
        require("proximal_weight", proximal_weight, proximal_weight >= 0, "at least 0")
        self.proximal_weight = proximal_weight

    def fit_settings(self) -> dict[str, Any]:
        return {"proximal_weight": self.proximal_weight}

    def setting_ranges(self) -> dict[str, tuple[float, float]]:
        return {"proximal_weight": (self.proximal_weight, self.proximal_weight)}
