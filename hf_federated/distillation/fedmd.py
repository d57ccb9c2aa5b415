"""FedMD: clients learn the mean of their class scores.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation (arXiv:1910.03581), algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..methods import ClientPart
from .base import Distillation
from .client import DistillationPart
from .losses import mean_absolute_error
from .requirements import Requirements
from .server import DistillationServer


class FedMDPart(DistillationPart):
    """Client half of [`FedMD`]."""

    def client_loss(self, logits: torch.Tensor, targets: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
        return mean_absolute_error(logits, targets)


@dataclass(kw_only=True, repr=False, eq=False)
class FedMD(Distillation):
    """
    FedMD: the server's model and the clients learn the mean of the clients' class scores.

    [FedMD: Heterogenous Federated Learning via Model Distillation](https://arxiv.org/abs/1910.03581) (Li and Wang,
    2019), algorithm 1.

    The server's model and the clients learn the mean of the clients' class scores (logits) of the public examples,
    `z̄ = (1/K) Σ_k z_k`, by mean absolute error (the paper's "digest"). The local training of the next round is the
    paper's "revisit". After the last round, clients have digested but not revisited. Evaluations of the clients'
    models use these models.

    The implementation differs from the paper in these points:
    - The paper first trains its clients on labeled public examples. Public examples have no labels here, so start
      from models that are already trained (`ClientSpec(model=...)`).
    - The paper draws some of the public examples in each round. Here, all public examples are used.
    - The paper has no server model. Here, the server's model learns the same targets as the clients.

    Args:
        kwargs (*optional*): As in [`Distillation`], except `temperature`, because the loss has no temperature.

    Raises:
        ValueError: As in [`Distillation`].

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. `train_on_labeled=True` also needs
          labeled examples on the server.
        - Models: any architectures and tokenizers with the same labels in the same order. Token prediction needs the
          same vocabulary.
        - Tasks: those of [`Distillation`], and also regression and multi-label classification, because the mean
          absolute error applies to any scores.
        - Sent: logits of the public examples from the clients, and their mean from the server. No parameters.

    Relations:
        - [`DSFL`] averages probabilities, sharpens the mean and learns it by cross-entropy.
        - [`Cronus`] averages probabilities robustly, which limits the influence of a few arbitrary clients.
        - [`MHAT`] sends the logits of the server's model instead of the mean.
        - Choose FedMD if the predictions are not distributions over classes. It is the only method for regression.

    Example:

    ```python
    >>> from hf_federated import FedMD

    >>> FedMD()
    FedMD()
    ```
    """

    name: ClassVar[str] = "fedmd"
    client_part: ClassVar[type[ClientPart]] = FedMDPart
    # The mean absolute error has no temperature.
    ignores: ClassVar[tuple[str, ...]] = ("temperature",)

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, class_probabilities=False)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_absolute_error(logits, targets)

    def broadcast(self, ensemble: torch.Tensor, server: DistillationServer) -> torch.Tensor:
        return ensemble
