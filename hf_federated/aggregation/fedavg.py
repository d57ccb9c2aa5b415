"""FedAvg: weighted mean of the parameters of the clients."""

from __future__ import annotations

from typing import ClassVar

from .base import Aggregation


class FedAvg(Aggregation):
    """
    FedAvg: the weighted mean of the parameters of the clients.

    [Communication-Efficient Learning of Deep Networks from Decentralized Data](https://arxiv.org/abs/1602.05629)
    (McMahan et al., AISTATS 2017), algorithm 1.

    The new global parameters are the weighted mean of the parameters that the clients trained:
    `x ← Σ_i n_i x_i / Σ_i n_i`. `n_i` is the weight of client `i`.

    | paper | here |
    |---|---|
    | `n_k`, number of examples of a client | `weighting="examples"` |
    | `C`, fraction of clients | `clients_per_round` of [`FederatedConfig`] |
    | `E`, local epochs | `local_epochs` of [`FederatedConfig`] |
    | `B`, `η`, local batch size and learning rate | `TrainingArguments` |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `weighting` is unknown.

    Requirements:
        None.

    Relations:
        - [`FedOpt`] with `server_optimizer="sgd"` and `server_lr=1.0` takes the same step up to rounding.
        - [`FedProx`] adds a proximal term to the loss of the clients.

    Example:

    ```python
    >>> from hf_federated import FedAvg, FederatedConfig

    >>> FederatedConfig(aggregation="fedavg", aggregation_kwargs={"weighting": "uniform"}).aggregation
    'fedavg'
    >>> FedAvg(weighting="uniform")
    FedAvg(weighting='uniform')
    ```
    """

    name: ClassVar[str] = "fedavg"
