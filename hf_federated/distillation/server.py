"""`DistillationServer`: the server's model, the public examples and, optionally, the server's labeled examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from ..adapters import Exchange
from ..clients.student import Student
from ..messages import public_order
from ..utils.random import derived_seed, isolated_rng
from ..utils.weighted_mean import State
from .feedback import chain_rule_feedback, evaluation_mode, loss_gradients, virtual_step
from .lazy_rows import LazyRows
from .losses import soft_cross_entropy
from .previous_release import FormerServerNames
from .public_rows import PublicRows
from .teachers import Teachers


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(repr=False, eq=False)
class DistillationServer(FormerServerNames):
    """
    The server's side of a distillation: a model to train, public examples and, optionally, labeled examples.

    Args:
        student ([`~hf_federated.clients.Student`]): The server's model with the public examples.
        seed (`int`): Seed of the run.
        num_rounds (`int`): Number of rounds of the run.
        exchange ([`~hf_federated.adapters.Exchange`]): Reads and writes the exchanged parameters of the server's
            model.
        num_clients (`int`): Number of clients in the federation.
        clients_per_round (`int`): Number of clients that the server selects in a round.
        labeled (`datasets.Dataset`, *optional*): The server's labeled examples, encoded for its model.
        teachers ([`Teachers`], *optional*): The clients' models, for a method that needs them.
        device (`torch.device`, *optional*): Device of the global state. Defaults to the device of the model.

    Example: [`Distillation`].
    """

    student: Student
    seed: int
    num_rounds: int
    exchange: Exchange
    num_clients: int
    clients_per_round: int
    labeled: Dataset | None = None
    teachers: Teachers | None = None
    device: torch.device | None = None

    def __post_init__(self) -> None:
        self.num_rows = self.student.num_rows
        self.batch_size = self.student.batch_size

    def read(self) -> State:
        """Copy the exchanged parameters of the server's model to `device`."""
        return self.exchange.read(self.device)

    @property
    def all_rows(self) -> PublicRows:
        """All public examples in their original order."""
        return PublicRows(0, self.num_rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape `(rows, classes)` of predictions of all public examples."""
        return self.shape_of(self.all_rows)

    def shape_of(self, rows: PublicRows) -> tuple[int, int]:
        """
        Shape `(rows, classes)` of predictions of some public examples.

        If the model predicts words or tokens, `rows` is the number of positions in these examples.

        Args:
            rows ([`PublicRows`]): The public examples.
        """
        positions = self.student.positions
        num_positions = len(rows) if positions is None else len(positions.numbers_of(self.numbers_of(rows)))
        return num_positions, self.student.num_classes

    def num_agreed(self, rows: PublicRows) -> int:
        """
        Number of predictions that the current exchange covers for some public examples.

        For words, the exchange leaves out each word that the tokenizer of the server or of a client drops.

        Args:
            rows ([`PublicRows`]): The public examples.
        """
        positions = self.student.positions
        return len(rows) if positions is None else len(positions.agreed_of(self.numbers_of(rows)))

    @property
    def batches_per_epoch(self) -> int:
        """Number of mini-batches in a pass over the public examples."""
        return -(-self.num_rows // self.batch_size)

    def mini_batches(self, round: int, epoch: int) -> Iterable[PublicRows]:
        """
        Split the public examples into mini-batches. Each epoch has its own order.

        Args:
            round (`int`): Round number, from 0.
            epoch (`int`): Epoch number, from 0.
        """
        order = derived_seed(self.seed, "public rows", round, epoch)
        starts = range(0, self.num_rows, self.batch_size)
        return [PublicRows(start, min(start + self.batch_size, self.num_rows), order) for start in starts]

    def numbers_of(self, rows: PublicRows) -> torch.Tensor:
        """
        The indices of some public examples.

        Args:
            rows ([`PublicRows`]): The public examples.

        Returns:
            `torch.Tensor`: Indices of shape `(rows,)`.
        """
        return rows.indices(self.num_rows)

    def predict(self) -> torch.Tensor:
        """
        Predict all public examples with the server's model.

        Returns:
            `torch.Tensor`: Logits of shape `(rows, classes)`, float32.
        """
        return self.student.predict(torch.arange(self.num_rows))

    def prepare(self, public_epochs: int, labeled_epochs: int = 0) -> None:
        """
        Create the optimizer and its learning rate schedule over the run. An existing optimizer is kept.

        Args:
            public_epochs (`int`): Number of passes over the public examples in a round.
            labeled_epochs (`int`, *optional*, defaults to `0`): Number of passes over the labeled examples in a
                round.
        """
        labeled_batches = 0 if self.labeled is None else -(-len(self.labeled) // self.batch_size)
        steps = public_epochs * self.batches_per_epoch + labeled_epochs * labeled_batches
        self.student.prepare(self.num_rounds * steps)

    def _require_labeled(self) -> Dataset:
        """The labeled examples, which the method requires."""
        if self.labeled is None:
            raise ValueError("The server has no labeled examples. Pass `server_dataset` to the trainer.")
        return self.labeled

    def fit_labeled(self, num_epochs: int, round: int) -> float:
        """
        Train the server's model on the server's labeled examples with the loss that the model computes.

        Args:
            num_epochs (`int`): Number of passes over the examples.
            round (`int`): Round number, from 0.

        Returns:
            `float`: Mean loss of the last epoch.
        """
        labeled = self._require_labeled()
        seed = derived_seed(self.seed, "labelled training", round)
        self.student.model.train()
        losses: list[torch.Tensor] = []
        with isolated_rng(derived_seed(seed, "dropout")):
            for epoch in range(num_epochs):
                losses = [
                    self.student.step(self.student.loss(self.student.collate(labeled, batch)))
                    for batch in public_order(len(labeled), derived_seed(seed, "epoch", epoch)).split(self.batch_size)
                ]
        return float(torch.stack(losses).mean())

    def fit(self, targets: torch.Tensor | LazyRows, loss: Loss, num_epochs: int, round: int) -> float:
        """
        Train the server's model on targets of all public examples. Call [`~DistillationServer.prepare`] first.

        Args:
            targets (`torch.Tensor` or `LazyRows`): Targets of shape `(rows, classes)`.
            loss (`Callable`): `loss(logits, targets)` of a batch, a scalar.
            num_epochs (`int`): Number of passes over the examples.
            round (`int`): Round number, from 0.

        Returns:
            `float`: Mean loss of the last epoch.
        """
        seed = derived_seed(self.seed, "server distillation", round)
        return self.student.fit(torch.arange(self.num_rows), targets, loss, num_epochs, seed)

    def train_step(
        self, inputs: dict[str, Any], loss: Callable[[torch.Tensor], torch.Tensor], purpose: tuple[int, ...]
    ) -> torch.Tensor:
        """
        Train the server's model for one step on a batch, with dropout. Call [`~DistillationServer.prepare`] first.

        Args:
            inputs (`dict[str, Any]`): The batch, as inputs of the model.
            loss (`Callable`): `loss(logits)`, a scalar.
            purpose (`tuple[int, ...]`): Identifies the step. The seed of dropout is derived from it.

        Returns:
            `torch.Tensor`: The loss, detached.
        """
        self.student.model.train()
        with isolated_rng(derived_seed(self.seed, "server step", *purpose)):
            logits = self.student.forward(inputs)
        return self.student.step(loss(logits))

    def evaluate_loss(self, loss: Callable[[], torch.Tensor]) -> float:
        """
        Compute a loss of the server's model without dropout.

        Args:
            loss (`Callable`): `loss()`, a scalar.
        """
        with evaluation_mode(self.student.model), torch.no_grad():
            return float(loss())

    def ensemble_gradient(
        self,
        inputs: dict[str, Any],
        ensemble: torch.Tensor,
        loss: Callable[[], torch.Tensor],
        step_size: float,
        scale: float | None = None,
    ) -> torch.Tensor:
        """
        Differentiate a loss after a step of plain gradient descent with respect to the ensemble of the step.

        Args:
            inputs (`dict[str, Any]`): The batch of public examples, as inputs of the model.
            ensemble (`torch.Tensor`): Probabilities `q` that the step learns, of shape `(rows, classes)`.
            loss (`Callable`): `loss()`, a scalar of the model after the step.
            step_size (`float`): Step size of the gradient descent.
            scale (`float`, *optional*): Replaces `step_size` as a factor of the derivative. Defaults to `step_size`,
                which gives the derivative itself.

        Returns:
            `torch.Tensor`: `(scale / step_size) ∂L/∂q`, of shape `(rows, classes)`.
        """
        student = self.student
        parameters = {name: item for name, item in student.model.named_parameters() if item.requires_grad}
        with evaluation_mode(student.model):
            gradients = loss_gradients(soft_cross_entropy(student.forward(inputs), ensemble), parameters)
            with virtual_step(parameters, gradients, step_size):
                after = loss_gradients(loss(), parameters)
        scale = step_size if scale is None else scale
        return chain_rule_feedback(
            student.model, inputs, after, scale, compute_logits=lambda model, inputs: student.forward(inputs)
        )

    def labeled_batch(self, size: int, *purpose: str | int) -> dict[str, Any]:
        """
        Draw labeled examples without replacement.

        Args:
            size (`int`): Number of examples. At most all labeled examples are drawn.
            purpose (`str` or `int`): Identifies the draw. The same purpose gives the same examples.

        Returns:
            `dict[str, Any]`: The batch, as inputs of the server's model, with `labels`.
        """
        labeled = self._require_labeled()
        rows = public_order(len(labeled), derived_seed(self.seed, "labelled rows", *purpose))[:size]
        return self.student.collate(labeled, rows)
