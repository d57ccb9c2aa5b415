"""The baselines of FedID as in its published code, for comparison with the methods of their papers.

The code that was published with FedID (Ma et al., EMNLP 2023) trains its baselines on hard labels:

- DS-FL: the server and the clients learn the argmax of the mean of the clients' logits, weighted by size. In its own
  paper, and in `hf_federated`, they learn the sharpened mean of probabilities.
- MHAT: the server learns the argmax of each client, and the clients learn the argmax of the server's logits. In
  `hf_federated`, the server learns the mean of probabilities, and the clients learn the server's logits.
- FedKD: squared error on the mean of logits, weighted by size, in three local and three distillation epochs. In its
  own paper, and in `hf_federated`, the loss is the KL divergence, and the weights follow the class counts.

A recipe names a class as `federation.distillation: recipes.fedid.published:PublishedDSFL`. The command must start in
the folder that contains `recipes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from hf_federated.distillation import (
    DSFL,
    MHAT,
    Cohort,
    DistillationServer,
    FedKD,
    mean_squared_error,
    num_examples_by_client,
    weighted_mean,
)
from hf_federated.distillation.dsfl import SoftLabelPart
from hf_federated.methods import ClientPart


def one_hot(logits: torch.Tensor) -> torch.Tensor:
    """
    The largest class of each row as probabilities.

    Args:
        logits (`torch.Tensor`): Logits of shape `(rows, classes)`.
    """
    return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)


@dataclass(kw_only=True, repr=False, eq=False)
class PublishedDSFL(DSFL):
    """DS-FL in the published code of FedID: `argmax Σ_k |D_k| z_k` by cross-entropy, on the server and the clients."""

    name: ClassVar[str] = "published-dsfl"

    def ensemble(self, predictions: dict[str, torch.Tensor], cohort: Cohort) -> torch.Tensor:
        return one_hot(weighted_mean(predictions, num_examples_by_client(cohort)))


@dataclass(kw_only=True, repr=False, eq=False)
class PublishedMHAT(MHAT):
    """MHAT in the published code of FedID: `Σ_k w_k CE(f, argmax z_k)` on the server, and `CE(f_k, argmax f)`."""

    name: ClassVar[str] = "published-mhat"
    client_part: ClassVar[type[ClientPart]] = SoftLabelPart
    broadcasts: ClassVar[str] = "probabilities"
    ignores: ClassVar[tuple[str, ...]] = ("temperature",)

    def ensemble(self, predictions: dict[str, torch.Tensor], cohort: Cohort) -> torch.Tensor:
        votes = {client_id: one_hot(logits) for client_id, logits in predictions.items()}
        return weighted_mean(votes, num_examples_by_client(cohort))

    def broadcast(self, ensemble: Any, server: DistillationServer) -> torch.Tensor:
        return one_hot(server.predict())


@dataclass(kw_only=True, repr=False, eq=False)
class PublishedFedKD(FedKD):
    """FedKD in the published code of FedID: squared error on the mean of logits, weighted by size, in three epochs."""

    name: ClassVar[str] = "published-fedkd"
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr", "temperature")

    weighting: str = "size"
    server_epochs: int = 3

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_squared_error(logits, targets)
