"""FedSVD: clients train the factors `B`, and the server factors the products again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ..methods import Accumulator
from ..utils.weighted_mean import State
from .lora_factors import FactorPair, factored_svd, find_pairs
from .lora_method import OneFactorAggregation


class FedSVD(OneFactorAggregation):
    """
    FedSVD: clients train and send the factors `B`, and the server factors `B A` again by its singular values.

    [FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA](https://arxiv.org/abs/2505.12805)
    (Lee et al., NeurIPS 2025).

    `B̄ = Σ_i w_i B_i` and `B̄ A = U Σ Vᵀ`, then `A ← Vᵀ` and `B ← U Σ`. The product stays the same, so the mean is
    exact. The rows of `A` are orthonormal, and point to the main directions of the product. Rows of `A` with the
    singular value 0 span what is left of the rows of the former `A`, so that they stay trainable. A client sends
    `r · out` values of a module, and receives both factors.

    | paper | here |
    |---|---|
    | `B_i`, `A_{t-1}` | factors of the clients, and the received factor |
    | `U`, `Σ`, `V` | computed from QR decompositions of both factors, without the product |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `weighting` is unknown. When the trainer is built, if the model has no LoRA module of which both
            factors are exchanged.

    Requirements:
        A PEFT model with LoRA, and `collector="synchronous"`. `client_optimizer_state="reset"`, because the moments of
        an optimizer belong to the former factors.

    Relations:
        - [`FFALoRA`] keeps the initial `A`.
        - [`RoLoRA`] trains `A` on the clients.

    Example:

    ```python
    >>> from hf_federated import FedSVD

    >>> FedSVD()
    FedSVD()
    ```
    """

    name: ClassVar[str] = "fedsvd"
    supports_late_updates: ClassVar[bool] = False
    changes_basis: ClassVar[bool] = True

    def frozen_factors(self, round: int, pairs: Sequence[FactorPair]) -> list[str]:
        return [pair.a for pair in pairs]

    @torch.no_grad()
    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        aggregated = super().aggregate(accumulator, state)
        for pair in find_pairs(state):
            mean = {pair.b: accumulator.mean.mean_of(pair.b, wide=True), pair.a: state[pair.a]}
            u, s, v = factored_svd(*pair.matrices(mean))
            aggregated |= pair.write(state, u * s, v.T)
        return aggregated
