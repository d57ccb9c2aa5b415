"""FedED: clients send predictions and receive the server's parameters.

Sui et al., FedED: Federated Learning via Ensemble Distillation for Medical Relation Extraction (EMNLP 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import ClientLogits, Distillation
from .client_weights import num_examples_by_client, weighted_mean
from .cohort import Cohort
from .server import DistillationServer


@dataclass(kw_only=True, repr=False, eq=False)
class FedED(Distillation):
    """
    FedED: clients send predictions and receive the server's parameters.

    [FedED: Federated Learning via Ensemble Distillation for Medical Relation
    Extraction](https://aclanthology.org/2020.emnlp-main.165) (Sui et al., EMNLP 2020).

    The server's model learns the mean of the clients' logits, weighted by their numbers of examples,
    `Σ_k |D_k| z_k / Σ_k |D_k|`, by KL divergence. All clients start their next round from the parameters of the
    server's model.

    In the paper, the server also trains on labeled public examples. This class uses unlabeled public examples, as
    the comparison in FedID (Ma et al., 2023) does. `train_on_labeled=True` adds the server's labeled examples.

    Args:
        kwargs (*optional*): As in [`Distillation`], except `client_epochs` and `client_lr`, because clients do not
            distill.

    Raises:
        ValueError: As in [`Distillation`].

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. `train_on_labeled=True` also needs
          labeled examples on the server.
        - Models: one architecture for the server and all clients.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]).
        - Sent: predictions of the public examples from the clients, parameters from the server.

    Relations:
        - [`MHAT`] sends predictions in both directions. Choose FedED if all models have one architecture and the
          clients can receive parameters.
        - [`FedDF`] averages the clients' parameters and sends them in both directions.
        - [`FedKD`] sends predictions once, and nothing back.

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

    def ensemble(self, predictions: ClientLogits, cohort: Cohort) -> torch.Tensor:
        return weighted_mean(predictions, num_examples_by_client(cohort))

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> None:
        return None
