"""A server and clients in float64, and the exact gradients of the server's validation loss by double backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tiny import VOCAB_SIZE, tiny_model
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_federated.distillation import (
    evaluation_mode,
    loss_gradients,
    mean_squared_error,
    model_logits,
    soft_cross_entropy,
    virtual_step,
)


STEP_SIZE = 0.3


@dataclass
class Federation:
    """A public batch, labeled examples of the server, the server's model, the clients' models and their weights."""

    server: nn.Module
    clients: list[nn.Module]
    weights: list[float]
    public: dict[str, torch.Tensor]
    labeled: dict[str, torch.Tensor]
    labels: torch.Tensor

    def validation_loss(self, model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model_logits(model, self.labeled), self.labels)

    def predictions(self, averaged: str) -> list[torch.Tensor]:
        logits = [client(self.public["x"]) for client in self.clients]
        return logits if averaged == "logits" else [z.softmax(-1) for z in logits]

    def ensemble(self, averaged: str) -> torch.Tensor:
        """`Σ w_k y^k`, with a graph to every client."""
        return sum(weight * y for weight, y in zip(self.weights, self.predictions(averaged), strict=True))

    def validation_gradients(
        self, teacher: torch.Tensor, loss: Callable[..., torch.Tensor] = soft_cross_entropy
    ) -> dict[str, torch.Tensor]:
        """`v`, computed in the same way as on the server."""
        parameters = dict(self.server.named_parameters())
        with evaluation_mode(self.server):
            gradients = loss_gradients(loss(model_logits(self.server, self.public), teacher), parameters)
            with virtual_step(parameters, gradients, STEP_SIZE):
                return loss_gradients(self.validation_loss(self.server), parameters)


class Perceptron(nn.Sequential):
    """
    A perceptron with 4 inputs and 6 hidden units.

    It is smooth, so that finite differences converge. It takes its input as `x=`, as a model takes its inputs.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def federation(
    kind: str = "mlp", num_classes: int = 3, num_rows: int = 5, weights: tuple[float, ...] = (0.5, 0.3, 0.2)
) -> Federation:
    """Build a federation with an `"mlp"` or a `"bert"` server. The clients are perceptrons in both cases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clients: list[nn.Module] = [Perceptron(num_classes).double() for _ in weights]
        public = {"x": torch.randn(num_rows, 4, dtype=torch.float64)}
        labeled = {"x": torch.randn(7, 4, dtype=torch.float64)}
        labels = torch.randint(num_classes, (7,))
        if kind == "mlp":
            return Federation(Perceptron(num_classes).double(), clients, list(weights), public, labeled, labels)
        server = TextServer(num_classes)
        for inputs, count in ((public, num_rows), (labeled, 7)):
            inputs["input_ids"] = torch.randint(1, VOCAB_SIZE, (count, 6))
            inputs["attention_mask"] = (torch.arange(6) < torch.randint(3, 7, (count, 1))).long()
        return Federation(server, clients, list(weights), public, labeled, labels)


class TextServer(nn.Module):
    """A tiny BERT in float64. It ignores `x`, the clients' representation of an example."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        # With BERT's default initial range, the derivatives would be close to 0.
        self.bert = tiny_model(num_labels=num_classes, initializer_range=0.3).double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, x: torch.Tensor) -> Any:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask)


def exact_gradients(
    federation: Federation, averaged: str, loss: str = "cross_entropy"
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """
    Gradients of the validation loss with respect to the clients' parameters and the ensemble.

    The graph includes the server's step. All models are in evaluation mode.
    """
    server = federation.server.eval()
    parameters = {name: value.detach().requires_grad_() for name, value in server.named_parameters()}

    def logits(values: Mapping[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = functional_call(server, dict(values), (), inputs)
        return outputs if isinstance(outputs, torch.Tensor) else outputs.logits

    ensemble = federation.ensemble(averaged)
    with sdpa_kernel(SDPBackend.MATH):  # Fused attention has no second derivative.
        student = logits(parameters, federation.public)
        if loss == "mean_squared_error":
            server_loss = mean_squared_error(student, ensemble)
        else:
            server_loss = soft_cross_entropy(student, ensemble.softmax(-1) if averaged == "logits" else ensemble)
        gradients = torch.autograd.grad(
            server_loss, list(parameters.values()), create_graph=True, allow_unused=True, materialize_grads=True
        )
        stepped = {
            name: value - STEP_SIZE * gradient
            for (name, value), gradient in zip(parameters.items(), gradients, strict=True)
        }
        validation_loss = F.cross_entropy(logits(stepped, federation.labeled), federation.labels)
        weights = [weight for client in federation.clients for weight in client.parameters()]
        *client_gradients, ensemble_gradient = torch.autograd.grad(validation_loss, [*weights, ensemble])
    return client_gradients, ensemble_gradient
