"""FedDF: the average of the clients' models learns the average of their predictions.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning (NeurIPS 2020), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import Trainer

from ..clients.context import ClientContext
from ..clients.student import Student
from .base import Distillation
from .client import DistillationClient, LocalDistillation
from .cohort import Cohort
from .server import DistillationServer


PUBLIC_LOGITS = "public_logits"


class SendPublicLogits(LocalDistillation):
    """Sends the model's logits of all public examples with the update."""

    def __init__(self, student: Student) -> None:
        self._student = student

    def finish(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, torch.Tensor]:
        return {PUBLIC_LOGITS: self._student.predict(range(self._student.num_rows))}


class FedDFClient(DistillationClient):
    """The client side of [`FedDF`]."""

    def local_training(self, context: ClientContext, round: int) -> LocalDistillation:
        return SendPublicLogits(context.student)


@dataclass(kw_only=True, repr=False, eq=False)
class FedDF(Distillation):
    """
    Parameters are averaged as `aggregation` says; then the server's model learns the mean of the clients' logits of
    the public rows by KL divergence, `T² KL(softmax(z̄ / T) ‖ softmax(z / T))`.

    Clients send their logits with their parameters, so that the server holds no model but its own. (A server that is
    given the parameters could predict for itself; it would need each client's model in turn, and as long.) All models
    have one architecture; the paper's prototypes of several are not here.

    Args:
        kwargs (*optional*): As in [`Distillation`], but for `client_epochs`, `client_lr`,
            `prediction_dtype` and `top_k`: clients do not distil, and what is averaged travels in float32. (Of a
            vocabulary that is much: [`FedED`] sends the likely tokens.)

    Example:

    ```python
    >>> from hf_federated import FedDF

    >>> FedDF(server_epochs=3)
    FedDF(server_epochs=3)
    ```
    """

    name: ClassVar[str] = "feddf"
    parameters: ClassVar[str] = "averaged"
    client_class: ClassVar[type[DistillationClient]] = FedDFClient
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr", "prediction_dtype", "top_k")

    def expected_extra(self, server: DistillationServer) -> dict[str, torch.Tensor]:
        # All clients have the server's tokenizer, so that what it keeps nothing of is the same for all.
        return {PUBLIC_LOGITS: torch.empty(server.num_agreed(server.all_rows), server.student.num_classes)}

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        assert cohort.extra is not None
        return self.train_server(cohort.extra.mean_of(PUBLIC_LOGITS), cohort.round, server)
