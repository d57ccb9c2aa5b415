"""FedEx-LoRA: means of the LoRA factors, and the difference to the mean of the products in the base weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from ..messages import ClientUpdate
from ..methods import Accumulator, UpdateCollection
from ..utils.weighted_mean import State, Tensors
from .base_changes import BaseChangesAggregation
from .lora_factors import FactorPair, find_pairs


UPDATES = "updates"


class FedExLoRA(BaseChangesAggregation):
    """
    FedEx-LoRA: the means of the LoRA factors, and the difference to the mean of the products in the base weights.

    [FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
    Models](https://arxiv.org/abs/2410.09432) (Singhal et al., ACL 2025).

    `Ā = Σ_i w_i A_i`, `B̄ = Σ_i w_i B_i` and `W_0 ← W_0 + s (Σ_i w_i B_i A_i − B̄ Ā)`, with the shares `w_i` of the
    weights and the scale `s`. The change of a module is then the exact mean of the clients' changes. For `n` clients,

    `Σ_i w_i B_i A_i − B̄ Ā = Σ_{i<n} w_i (B_i − B̄) (A_i − A_n)`,

    so the residual is sent as factors of rank `(n − 1) r`. A client receives the residuals of all rounds since its
    last one, or the base weights of the LoRA modules if these have fewer values. Each client keeps the base weights of
    the LoRA modules. `federated/lora_inexactness` in the log is the residual as a share of the change of the round.

    `save_model` and checkpoints contain the merged model, because the adapter alone does not equal the global model.

    | paper | here |
    |---|---|
    | `ΔW_res` | the factors that a client adds to its base weights |
    | `1/k` | `weighting="uniform"` |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `weighting` is unknown. When the trainer is built, if the model has no LoRA module of which both
            factors are exchanged, or a base weight is not in float32 or float64, or is tied to another weight.

    Requirements:
        A PEFT model with LoRA and base weights in float32. The server keeps the factors of a round in a temporary
        file. `collector="synchronous"`.

    Relations:
        - [`FedIT`] leaves the residual out.
        - [`StackedLora`] keeps the nearest product of rank `r`, and with `reset=True` adds all changes to the base
          weights.

    Example:

    ```python
    >>> from hf_federated import FedExLoRA

    >>> FedExLoRA()
    FedExLoRA()
    ```
    """

    name: ClassVar[str] = "fedex_lora"
    changes_base = True

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        base = self.base_names
        accumulator = super().accumulator({name: value for name, value in state.items() if name not in base}, extra)
        factors = {name: state[name] for pair in find_pairs(state) for name in (pair.a, pair.b)}
        accumulator.collections[UPDATES] = UpdateCollection(factors)
        return accumulator

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        base = self.base_names
        accumulator.collections[UPDATES].add(update.client_id, update.state, self.weight(update))
        adapter = {name: value for name, value in update.state.items() if name not in base}
        super().accumulate(accumulator, dataclasses.replace(update, state=adapter))

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        updates = accumulator.collections[UPDATES]
        try:
            aggregated = super().aggregate(accumulator, state)
            factors = {
                module.base: residual(updates, FactorPair(module.a, module.b), aggregated, module.scaling)
                for module in self._modules.values()
            }
            aggregated |= self.change_base(len(updates) - 1, factors, state, updates.client_ids)
        finally:
            updates.close()
        return {name: aggregated[name] for name in state}


def residual(
    updates: UpdateCollection, pair: FactorPair, mean: Tensors, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return factors of `s (Σ_i w_i B_i A_i − B̄ Ā)`, for the shares `w_i` of the weights.

    Args:
        updates ([`UpdateCollection`]): The factors of `n` clients, and their weights.
        pair ([`FactorPair`]): The module.
        mean (`Mapping[str, torch.Tensor]`): The means of the factors.
        scaling (`float`): The scale `s`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: `L` of shape `(out, (n − 1) r)` and `R` of shape `((n − 1) r, in)`, in
            float64.
    """
    mean_b, _ = pair.matrices(mean)
    total, *others, last = sum(updates.weights.values()), *updates.weights
    last_a = pair.read(updates, last)[1]
    lefts, rights = [mean_b.new_zeros(len(mean_b), 0)], [last_a.new_zeros(0, last_a.shape[1])]
    for client_id in others:
        b, a = pair.read(updates, client_id)
        lefts.append(scaling * updates.weights[client_id] / total * (b - mean_b))
        rights.append(a - last_a)
    return torch.cat(lefts, 1), torch.cat(rights)
