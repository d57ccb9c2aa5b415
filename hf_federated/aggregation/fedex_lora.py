"""FedEx-LoRA: means of the LoRA factors, and the difference to the mean of the products in the base weights."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..methods import Accumulator, UpdateCollection
from ..utils.weighted_mean import State, Tensors
from .base_changes import UPDATES, BaseChangesAggregation
from .lora_factors import FactorPair


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

    Quantized base weights, tied ones and those in half precision are not written. A second, frozen adapter of the
    model then has the sum of all residuals in float32. It is active together with the trained adapter, and its rank
    grows by `(n − 1) r` in each round, up to the smaller dimension of the module, where nothing is lost.
    `federated/lora_residual_rank` in the log is its largest rank.

    `save_model` and checkpoints contain the merged model, because the adapter alone does not equal the global model.
    With the second adapter, they contain one adapter that is the sum of both.

    | paper | here |
    |---|---|
    | `ΔW_res` | the factors that a client adds to its base weights |
    | `1/k` | `weighting="uniform"` |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].
        max_residual_rank (`int`, *optional*):
            Largest rank of the second adapter. The largest singular values are kept, and
            `federated/lora_residual_truncation` in the log is the largest lost share of the norm of a module.

    Raises:
        ValueError: If an argument is unknown or out of range. When the trainer is built, if the model has no LoRA
            module of which both factors are exchanged, or has a further adapter and base weights that cannot be
            written.

    Requirements:
        A PEFT model with LoRA. The server keeps the factors of a round in a temporary file.
        `collector="synchronous"`.

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
