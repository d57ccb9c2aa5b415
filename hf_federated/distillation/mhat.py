"""MHAT: the server's model teaches the clients.

Hu et al., MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme for Federated Learning (Information
Sciences 560, 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Distillation, Predictions, num_examples_by_client, weighted_mean
from .cohort import Cohort
from .losses import soft_cross_entropy


@dataclass(kw_only=True, repr=False, eq=False)
class MHAT(Distillation):
    """
    The server learns the clients' mean probabilities, weighted by their rows, by cross-entropy; the clients learn the
    logits of the *server's model* by KL divergence.

    The paper's server trains on labelled public rows as well; FedID (Ma et al., 2023) compares with the method on
    unlabelled ones, as here. `train_on_labelled=True` adds the server's own labelled rows.

    Args:
        kwargs (*optional*): As in [`Distillation`].

    Example:

    ```python
    >>> from hf_federated import MHAT

    >>> MHAT(client_epochs=3)
    MHAT(client_epochs=3)
    ```
    """

    name: ClassVar[str] = "mhat"

    def ensemble(self, predictions: Predictions, cohort: Cohort) -> torch.Tensor:
        probabilities = {client_id: logits.softmax(-1) for client_id, logits in predictions.items()}
        return weighted_mean(probabilities, num_examples_by_client(cohort))

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)
