"""FedPer: federated averaging of a body, with a head that stays with each client.

[Federated Learning with Personalization Layers](https://arxiv.org/abs/1912.00818) (Arivazhagan et al., 2019). The
paper trains body and head together, as here. Methods that train them one after the other, such as FedRep, are not
implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..utils.selection import check_selection
from .base import Aggregation


class FedPer(Aggregation):
    """
    FedPer: clients average the body of the model, and each client keeps its own head.

    [Federated Learning with Personalization Layers](https://arxiv.org/abs/1912.00818) (Arivazhagan et al., 2019),
    algorithms 1 and 2.

    Client `j` minimizes its loss over the body `W_B` and its own head `W_P_j`, starting from the received body and the
    head of its last training. The server computes

    `W_B ← Σ_j γ_j W_B,j` with `γ_j = n_j / Σ_k n_k`.

    `W_P_j` never leaves the client. It is in the client's state, also in checkpoints, and `evaluate_clients=True`
    evaluates each client with it. A client that has not trained has the initial head. The server's model, which
    `save_model` saves, keeps the initial head.

    | paper | here |
    |---|---|
    | `W_B`, base layers | the exchanged parameters |
    | `W_P_j`, personalization layers (`K_P` layers) | `local`, `keep_local` of [`FederatedConfig`] |
    | `γ_j` | `weighting` |
    | `e`, `b`, `η_j` | `local_epochs` of [`FederatedConfig`], `TrainingArguments` |

    Args:
        local (`str` or `Sequence[str]`, *optional*):
            Patterns of the names of the local tensors, such as `"classifier*"`, as `keep_local` of
            [`FederatedConfig`]. Defaults to the head: the parameters that the class of a transformers model adds to
            its base model, or `modules_to_save` of a PEFT model.
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight `γ_j` of an update: `"examples"`, `"tokens"` or `"uniform"`, as in [`Aggregation`].

    Raises:
        ValueError: If `local` is not a pattern or a list of patterns, or if `weighting` is unknown. When the trainer
            is built: if a pattern matches no tensor, or the model class adds no parameter to its base model.

    Requirements:
        Clients that share one model. A head with weights that are tied to the embeddings belongs to the base model, so
        language models with tied weights need `local`.

    Relations:
        - [`FedAvg`] averages the head too. Choose it if clients agree on the labels of equal examples.
        - `keep_local="head"` of [`FederatedConfig`] keeps the head in other algorithms, such as [`FedProx`].
        - [`LocalOnly`] and distillation keep whole models.

    Example:

    ```python
    >>> from hf_federated import FedPer

    >>> FedPer()
    FedPer()
    >>> FedPer(local="classifier*").keep_local
    'classifier*'
    ```
    """

    name: ClassVar[str] = "fedper"

    def __init__(self, local: str | Sequence[str] | None = None, weighting: str = "examples") -> None:
        super().__init__(weighting)
        self.local = local
        self.keep_local = "head" if local is None else check_selection("local", local)
