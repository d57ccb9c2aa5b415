"""FedIT: weighted mean of the LoRA factors of the clients."""

from __future__ import annotations

from typing import ClassVar

from .lora_method import LoraAggregation


class FedIT(LoraAggregation):
    """
    FedIT: the weighted means of the LoRA factors of the clients.

    [Towards Building the Federated GPT: Federated Instruction Tuning](https://arxiv.org/abs/2305.05644) (Zhang et al.,
    2023).

    `A ← Σ_i w_i A_i` and `B ← Σ_i w_i B_i`, with the weights `w_i` as shares of their sum. This is [`FedAvg`] on the
    parameters of the adapter, and gives the same bytes. `B A` is not the mean of the products `B_i A_i`:
    `federated/lora_inexactness` in the log is the difference, as a share of the change of the round.

    | paper | here |
    |---|---|
    | `p_k`, share of the examples of a client | `weighting="examples"` |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `weighting` is unknown. When the trainer is built, if the model has no LoRA module of which both
            factors are exchanged.

    Requirements:
        A PEFT model with LoRA.

    Relations:
        - [`FedAvg`] also averages adapters of other types.
        - [`FFALoRA`], [`RoLoRA`] and [`FedSVD`] train one factor in a round.

    Example:

    ```python
    >>> from hf_federated import FedIT

    >>> FedIT()
    FedIT()
    ```
    """

    name: ClassVar[str] = "fedit"
