"""FedAvg: the clients' parameters, averaged.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data (AISTATS 2017), algorithm 1.
"""

from __future__ import annotations

from typing import ClassVar

from .base import Aggregation


class FedAvg(Aggregation):
    """
    The weighted mean of what the clients trained: `x ← Σ_i n_i x_i / Σ_i n_i`.

    | paper | here |
    |---|---|
    | `n_k`, examples of a client | `weighting="examples"` |
    | `C`, fraction of clients | `clients_per_round` of [`FederatedConfig`] |
    | `E`, local epochs | `local_epochs` of [`FederatedConfig`] |
    | `B`, `η`, local batch size and learning rate | `TrainingArguments` |

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            `"examples"`, `"tokens"` or `"uniform"`.

    Relations:
        - [`FedOpt`] with its defaults' momentum set to 0 takes the same step up to rounding.
        - [`FedProx`] adds a term to the clients' loss.

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
