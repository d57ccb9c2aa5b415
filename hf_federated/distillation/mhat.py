"""MHAT: the server's model learns from the clients and then teaches them.

Hu et al., MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme for Federated Learning (Information
Sciences 560, 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import ClientLogits, Distillation
from .client_weights import num_examples_by_client, weighted_mean
from .cohort import Cohort
from .losses import soft_cross_entropy


@dataclass(kw_only=True, repr=False, eq=False)
class MHAT(Distillation):
    """
    MHAT: the server's model learns from the clients and then teaches them.

    [MHAT: An Efficient Model-Heterogenous Aggregation Training Scheme for Federated
    Learning](https://doi.org/10.1016/j.ins.2021.01.046) (Hu et al., Information Sciences 560, 2021).

    The server's model learns the mean of the clients' probabilities, weighted by their numbers of examples,
    `q = Σ_k |D_k| softmax(z_k) / Σ_k |D_k|`, by cross-entropy. The clients learn the logits of the *server's model* by
    KL divergence.

    In the paper, the server also trains on labeled public examples. This class uses unlabeled public examples, as
    the comparison in FedID (Ma et al., 2023) does. `train_on_labeled=True` adds the server's labeled examples.

    Args:
        kwargs (*optional*): As in [`Distillation`].

    Raises:
        ValueError: As in [`Distillation`].

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. `train_on_labeled=True` also needs
          labeled examples on the server.
        - Models: any architectures and tokenizers with the same labels in the same order. Token prediction needs the
          same vocabulary.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]).
        - Sent: predictions of the public examples in both directions. No parameters.

    Relations:
        - [`FedED`] sends the server's parameters to the clients instead of its logits, which needs one architecture.
        - [`FedMD`], [`DSFL`] and [`Cronus`] send the ensemble to the clients. Choose MHAT if the clients should learn
          from the trained model of the server, for example with `train_on_labeled=True`.
        - [`AdaFD`] weighs clients by their training loss and trains the server by squared error.
        - [`FedID`] exchanges mini-batches and adds feedback from labeled examples of the server.

    Example:

    ```python
    >>> from hf_federated import MHAT

    >>> MHAT(client_epochs=3)
    MHAT(client_epochs=3)
    ```
    """

    name: ClassVar[str] = "mhat"

    def ensemble(self, predictions: ClientLogits, cohort: Cohort) -> torch.Tensor:
        probabilities = {client_id: logits.softmax(-1) for client_id, logits in predictions.items()}
        return weighted_mean(probabilities, num_examples_by_client(cohort))

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return soft_cross_entropy(logits, targets)
