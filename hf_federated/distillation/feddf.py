"""FedDF: the average of the clients' models learns the average of their predictions.

Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning (NeurIPS 2020), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..messages import ClientUpdate
from ..methods import ClientPart
from ..utils.weighted_mean import State
from .base import Distillation
from .client import DistillationPart
from .cohort import Cohort
from .server import DistillationServer


PUBLIC_LOGITS = "public_logits"


class SendPublicLogits(DistillationPart):
    """Sends the model's logits of all public examples with the update."""

    def send(self, update: ClientUpdate) -> ClientUpdate:
        student = self.context.student
        return replace(update, extra={**update.extra, PUBLIC_LOGITS: student.predict(range(student.num_rows))})


@dataclass(kw_only=True, repr=False, eq=False)
class FedDF(Distillation):
    """
    FedDF: the averaged model learns the mean of the clients' predictions.

    [Ensemble Distillation for Robust Model Fusion in Federated Learning](https://arxiv.org/abs/2006.07242) (Lin et
    al., NeurIPS 2020), algorithm 1.

    The parameters are averaged as `aggregation` defines. Then the server's model learns the mean `z̄` of the clients'
    logits of the public examples by KL divergence, `T² KL(softmax(z̄ / T) ‖ softmax(z / T))`.

    Clients send their logits together with their parameters, so the server holds no model but its own. (A server with
    the clients' parameters could also compute the predictions itself. It would have to run each client's model in
    turn, which takes as long as all clients together.)

    Args:
        kwargs (*optional*): As in [`Distillation`], except `client_epochs`, `client_lr`, `prediction_dtype` and
            `top_k`. Clients do not distill, and the averaged tensors are sent in float32. For predictions over a
            vocabulary these tensors are large. [`FedED`] with `top_k` sends only the likely tokens.

    Raises:
        ValueError: As in [`Distillation`].

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients.
        - Models: one architecture for the server and all clients. The paper's variant with several architectures is
          not implemented.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]).
        - Sent: parameters in both directions, and from the clients also their logits of the public examples.

    Relations:
        - [`FedAvg`] stops after averaging. Choose FedDF if public examples are available and the clients' data differ.
        - [`FedAUX`] weighs each client per example by a certainty score. Equal scores give FedDF.
        - [`FedDRS`] needs no public examples. The server learns from each client's model on pseudo-samples.
        - [`FedED`] does not average parameters. Clients send predictions alone, and `top_k` applies.

    Example:

    ```python
    >>> from hf_federated import FedDF

    >>> FedDF(server_epochs=3)
    FedDF(server_epochs=3)
    ```
    """

    name: ClassVar[str] = "feddf"
    parameters: ClassVar[str] = "averaged"
    client_part: ClassVar[type[ClientPart]] = SendPublicLogits
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr", "prediction_dtype", "top_k")

    def update_extra(self, state: State) -> State:
        server = self.server
        # All clients have the server's tokenizer, so it drops the same words for all of them.
        return {PUBLIC_LOGITS: torch.empty(server.num_agreed(server.all_rows), server.student.num_classes)}

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        return self.train_server(cohort.extra.mean_of(PUBLIC_LOGITS), cohort.round, server)
