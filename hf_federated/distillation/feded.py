"""FedED: predictions go up, the server's parameters go down.

Sui et al., FedED: Federated Learning via Ensemble Distillation for Medical Relation Extraction (EMNLP 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Distillation, Predictions, num_examples_by_client, weighted_mean
from .cohort import Cohort
from .server import DistillationServer


@dataclass(kw_only=True, repr=False, eq=False)
class FedED(Distillation):
    """
    The server learns the clients' mean logits, weighted by their rows, by KL divergence; its parameters are where all
    clients start their next round. So all have the server's architecture.

    The paper's server also trains on labelled public rows; FedID (Ma et al., 2023) compares with the method on
    unlabelled ones, as here. `train_on_labelled=True` adds the server's own labelled rows.

    Args:
        kwargs (*optional*): As in [`Distillation`], but for `client_epochs` and `client_lr`: clients
            do not distil.

    Example:

    ```python
    >>> from hf_federated import FedED

    >>> FedED(server_epochs=3)
    FedED(server_epochs=3)
    ```
    """

    name: ClassVar[str] = "feded"
    parameters: ClassVar[str] = "sent"
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr")

    def ensemble(self, predictions: Predictions, cohort: Cohort) -> torch.Tensor:
        return weighted_mean(predictions, num_examples_by_client(cohort))

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> None:
        return None
