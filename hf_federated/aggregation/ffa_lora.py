"""FFA-LoRA: clients train the factors `B`, and the factors `A` keep their initial values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .lora_factors import FactorPair
from .lora_method import OneFactorAggregation


class FFALoRA(OneFactorAggregation):
    """
    FFA-LoRA: clients train and send the factors `B`, and the factors `A` keep their initial values.

    [Improving LoRA in Privacy-preserving Federated Learning](https://arxiv.org/abs/2403.12313) (Sun et al., ICLR
    2024).

    `B ← Σ_i w_i B_i`, and `A` is the initial factor of the server's model. The change of a module is linear in `B`, so
    the mean is exact, and noise on `B` is not multiplied by noise on `A`. A client sends `r · out` values of a module
    instead of `r · (out + in)`, and receives both factors.

    | paper | here |
    |---|---|
    | `A_0`, frozen random initialization | `A` of the server's model before the first round |
    | `B_i`, zero at the start | `B` of a PEFT model |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `weighting` is unknown. When the trainer is built, if the model has no LoRA module of which both
            factors are exchanged.

    Requirements:
        A PEFT model with LoRA.

    Relations:
        - [`FedIT`] trains and averages both factors.
        - [`RoLoRA`] alternates between the factors, and [`FedSVD`] changes `A` on the server.
        - [`FedAvg`] with `A` frozen by `requires_grad_(False)` computes the same, if all clients have the same `A`. It
          also works with secure aggregation.

    Example:

    ```python
    >>> from hf_federated import FFALoRA

    >>> FFALoRA(weighting="uniform")
    FFALoRA(weighting='uniform')
    ```
    """

    name: ClassVar[str] = "ffa_lora"

    def frozen_factors(self, round: int, pairs: Sequence[FactorPair]) -> list[str]:
        return [pair.a for pair in pairs]
