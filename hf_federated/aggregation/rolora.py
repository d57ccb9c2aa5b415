"""RoLoRA: clients train the factors `B` and `A` in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .lora_factors import FactorPair
from .lora_method import OneFactorAggregation


class RoLoRA(OneFactorAggregation):
    """
    RoLoRA: clients train and send the factors `B` in one round and the factors `A` in the next.

    [Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA](https://arxiv.org/abs/2502.01755) (Chen
    et al., NeurIPS 2025).

    `B ← Σ_i w_i B_i` in the first, third, … round, and `A ← Σ_i w_i A_i` in the other rounds. The other factor is the
    same for all clients, so each mean is exact. The first round trains `B`, because `A` has no gradient while `B` is
    zero. A client sends `r · out` or `r · in` values of a module, and receives both factors.

    | paper | here |
    |---|---|
    | `T` rounds of alternating updates | `num_rounds`, of which each trains one factor |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `weighting` is unknown. When the trainer is built, if the model has no LoRA module of which both
            factors are exchanged.

    Requirements:
        A PEFT model with LoRA, and `collector="synchronous"`: an update of an earlier round has the other factor.

    Relations:
        - [`FFALoRA`] never trains `A`.
        - [`FedIT`] trains and averages both factors in each round.

    Example:

    ```python
    >>> from hf_federated import RoLoRA

    >>> RoLoRA()
    RoLoRA()
    ```
    """

    name: ClassVar[str] = "rolora"
    supports_late_updates: ClassVar[bool] = False

    def frozen_factors(self, round: int, pairs: Sequence[FactorPair]) -> list[str]:
        return [pair.b if round % 2 else pair.a for pair in pairs]
