"""FedNova: mean of normalized updates, for clients that take different numbers of local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Disclosure
from ..methods import Accumulator, ClientPart
from ..utils.arguments import require
from ..utils.weighted_mean import State, Tensors, WeightedMean
from .base import Aggregation
from .fedprox import ProximalPart


NORMALIZER = "normalizer"


class NormalizerPart(ProximalPart):
    """Add the proximal gradient and compute the normalizer of this local training."""

    changes_gradients = True
    _normalizer = 0.0
    _momentum_buffer = 0.0

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        if self._weight > 0:
            super().on_gradients(parameters)

    def on_step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        rate, momentum = param_groups[0]["lr"], param_groups[0].get("momentum")
        if momentum is None or any((group["lr"], group["momentum"]) != (rate, momentum) for group in param_groups):
            raise ValueError(
                "FedNova needs SGD with one learning rate and one momentum for all parameters. Set optim='sgd' and do "
                "not override `create_optimizer`."
            )
        if any(group["nesterov"] or group["dampening"] for group in param_groups):
            raise ValueError("FedNova does not support Nesterov momentum or dampening. Remove both from optim_args.")
        # Plain SGD on a unit gradient. The proximal term subtracts `μ` times the distance covered.
        gradient = 1.0 - self._weight * self._normalizer
        self._momentum_buffer = momentum * self._momentum_buffer + gradient
        self._normalizer += rate * self._momentum_buffer

    def send(self, update: ClientUpdate) -> ClientUpdate:
        normalizer = torch.tensor(self._normalizer, dtype=torch.float64)
        return dataclasses.replace(update, extra={**update.extra, NORMALIZER: normalizer})


class FedNova(Aggregation):
    """
    FedNova: the mean of normalized updates.

    [Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization](https://arxiv.org/abs/2007.07481) (Wang et al., NeurIPS 2020).

    The server averages the parameter changes per unit of local progress:
    `x ← x + τ_eff Σ_i p_i Δ_i / τ_i`, with `τ_eff = Σ_i p_i τ_i` as in the experiments of the paper.

    `Δ_i` is the parameter change of client `i`. The normalizer `τ_i` is the distance that local training covers
    under a constant unit gradient. For SGD with a constant learning rate `η`, the normalizer is `η` times the number
    of local steps. With momentum, a proximal term or a learning-rate schedule, the client computes the normalizer step
    by step. It equals `η ‖a_i‖₁` in the paper.

    | paper | here |
    |---|---|
    | `p_i` | weight of the client from `weighting`, as a share of the sum of the weights |
    | `‖a_i‖₁` | normalizer, in units of the learning rate |
    | `ρ` | `momentum` of the client optimizer (`optim_args="momentum=0.9"`) |
    | `μ` | `proximal_weight` |

    Args:
        proximal_weight (`float`, *optional*, defaults to `0.0`):
            Weight `μ` of the proximal term `(μ/2) ‖w − w_t‖²` in the loss of the clients.
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `proximal_weight` is negative or `weighting` is unknown.

    Requirements:
        Clients train with SGD (`optim="sgd"`), with or without momentum. With momentum, clients start each round with
        a fresh optimizer (`client_optimizer_state="reset"`). Every engine is supported.

    Relations:
        - [`FedAvg`] gives the same result up to rounding if all clients take the same number of local steps.
        - [`FedProx`] adds the same proximal term and averages the changes without normalization.

    Example:

    ```python
    >>> from hf_federated import FedNova

    >>> FedNova(proximal_weight=0.1)
    FedNova(proximal_weight=0.1)
    ```
    """

    name: ClassVar[str] = "fednova"
    needs_gradients: ClassVar[bool] = True
    weighted_mean: ClassVar[str] = NORMALIZER
    client_part: ClassVar[type[ClientPart]] = NormalizerPart
    disclosures = (Disclosure("normalizer of the local training", "client"),)

    def __init__(self, proximal_weight: float = 0.0, weighting: str = "examples") -> None:
        super().__init__(weighting)
        require("proximal_weight", proximal_weight, proximal_weight >= 0, "at least 0")
        self.proximal_weight = proximal_weight

    def check_setup(self, args: Any, config: Any) -> None:
        if args.optim != "sgd":
            raise ValueError(f"FedNova cannot compute a normalizer for optim={args.optim.value!r}. Set optim='sgd'.")
        if config.client_optimizer_state == "carry" and "momentum" in (args.optim_args or ""):
            raise ValueError(
                "FedNova with momentum needs a fresh client optimizer in each round, but "
                "client_optimizer_state='carry'. Set client_optimizer_state='reset'."
            )

    def fit_settings(self) -> dict[str, Any]:
        return {"proximal_weight": self.proximal_weight}

    def setting_ranges(self) -> dict[str, tuple[float, float]]:
        return {"proximal_weight": (self.proximal_weight, self.proximal_weight)}

    def expected_extra(self, state: State) -> State:
        return {NORMALIZER: torch.zeros((), dtype=torch.float64)}

    def check_extra(self, extra: Tensors) -> None:
        if not extra[NORMALIZER] > 0:
            raise ValueError(f"the normalizer is {float(extra[NORMALIZER])}; it must be positive.")

    def amount_of_training(self, update: ClientUpdate) -> float:
        # A client with a tiny normalizer would multiply its change.
        return float(update.extra[NORMALIZER])

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        accumulator = super().accumulator(state, extra)
        accumulator.means[NORMALIZER] = WeightedMean(self.expected_extra(state))
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        weight = self.weight(update)
        accumulator.means["state"].add(update.state, weight / float(update.extra[NORMALIZER]))
        accumulator.means[NORMALIZER].add({NORMALIZER: update.extra[NORMALIZER]}, weight)
        if update.extra.keys() != {NORMALIZER}:
            # A distillation reads the uniform mean of the tensors that it adds to an update.
            accumulator.extra.add(update.extra, 1.0)

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        mean, normalizer = accumulator.mean, accumulator.means[NORMALIZER]
        # Σ p_i Δ_i / τ_i = (Σ p_i / τ_i) · (mean of the states weighted by p_i / τ_i, minus the global state).
        step = float(normalizer.mean_of(NORMALIZER)) * mean.total_weight / normalizer.total_weight
        return {name: self._move(value, mean.mean_of(name, wide=True), step) for name, value in state.items()}

    def _move(self, value: torch.Tensor, mean: torch.Tensor, step: float) -> torch.Tensor:
        if not value.is_floating_point():
            return mean
        wide = value.to(mean)
        return (wide + step * (mean - wide)).to(value.dtype)
