"""`DistillationServer`: the server's model over the public rows, and the labelled rows that the server may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset

from ..adapters import Exchange
from ..clients.student import Student
from ..messages import public_order
from ..utils.random import derived_seed, isolated_rng
from .cohort import PublicRows
from .packed import PackedRows
from .teachers import Teachers


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DistillationServer:
    """
    What the server of a distillation has: a model that learns, public rows, and perhaps labelled ones.

    Args:
        student ([`~hf_federated.clients.Student`]): The server's model over the public rows.
        seed (`int`): Of the run.
        num_rounds (`int`): Rounds of the run.
        exchange ([`~hf_federated.adapters.Exchange`]): Reads and writes that model.
        num_clients (`int`): Clients of the federation.
        clients_per_round (`int`): Clients that are asked in a round.
        labelled (`datasets.Dataset`, *optional*): The server's own labelled rows, encoded for its model.
        teachers ([`Teachers`], *optional*): The clients' models, for a method that needs them.

    Example: [`Distillation`].
    """

    def __init__(
        self,
        student: Student,
        seed: int,
        num_rounds: int,
        exchange: Exchange,
        num_clients: int,
        clients_per_round: int,
        labelled: Dataset | None = None,
        teachers: Teachers | None = None,
    ) -> None:
        self.student = student
        self.seed = seed
        self.num_rounds = num_rounds
        self.exchange = exchange
        self.num_clients = num_clients
        self.clients_per_round = clients_per_round
        self.labelled = labelled
        self.teachers = teachers
        self.num_rows = student.num_rows
        self.batch_size = student.batch_size

    @property
    def all_rows(self) -> PublicRows:
        """All public rows, as they are."""
        return PublicRows(0, self.num_rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Of predictions of all public rows: rows and classes."""
        return self.shape_of(self.all_rows)

    def shape_of(self, rows: PublicRows) -> tuple[int, int]:
        """
        Of predictions of a part of the public rows: rows, or their positions where the model does not predict once a
        row, and classes.

        Args:
            rows ([`PublicRows`]): Which.
        """
        positions = self.student.positions
        num_positions = len(rows) if positions is None else len(positions.numbers_of(self.numbers_of(rows)))
        return num_positions, self.student.num_classes

    def num_agreed(self, rows: PublicRows) -> int:
        """
        How many of these the exchange that runs is about: all but the words of which a tokenizer keeps nothing.

        Args:
            rows ([`PublicRows`]): Which.
        """
        positions = self.student.positions
        return len(rows) if positions is None else len(positions.agreed_of(self.numbers_of(rows)))

    @property
    def batches_per_epoch(self) -> int:
        """Mini-batches of a pass over the public rows."""
        return -(-self.num_rows // self.batch_size)

    def mini_batches(self, round: int, epoch: int) -> list[PublicRows]:
        """The public rows in mini-batches, in an order of their own in every epoch."""
        order = derived_seed(self.seed, "public rows", round, epoch)
        starts = range(0, self.num_rows, self.batch_size)
        return [PublicRows(start, min(start + self.batch_size, self.num_rows), order) for start in starts]

    def numbers_of(self, rows: PublicRows) -> torch.Tensor:
        """
        The row numbers of a part of the public rows.

        Returns:
            `torch.Tensor`: Of shape `(rows,)`.
        """
        return public_order(self.num_rows, rows.order)[rows.start : rows.stop]

    def predict(self) -> torch.Tensor:
        """
        The server's own logits of all public rows.

        Returns:
            `torch.Tensor`: Of shape `(rows, classes)`, float32.
        """
        return self.student.predict(torch.arange(self.num_rows))

    def prepare(self, public_epochs: int, labelled_epochs: int = 0) -> None:
        """
        Make the optimizer, with a learning-rate curve over the run, once.

        Args:
            public_epochs (`int`): Passes over the public rows in a round.
            labelled_epochs (`int`, *optional*, defaults to `0`): Passes over the labelled rows in a round.
        """
        labelled_batches = 0 if self.labelled is None else -(-len(self.labelled) // self.batch_size)
        steps = public_epochs * self.batches_per_epoch + labelled_epochs * labelled_batches
        self.student.prepare(self.num_rounds * steps)

    def fit_labelled(self, num_epochs: int, round: int) -> float:
        """
        Train the server's model on its own labelled rows, by the loss that the model computes.

        Args:
            num_epochs (`int`): Passes over the rows.
            round (`int`): Round number, from 0.

        Returns:
            `float`: The mean loss of the last epoch.
        """
        assert self.labelled is not None, "checked when the trainer was built"
        seed = derived_seed(self.seed, "labelled training", round)
        self.student.model.train()
        losses: list[torch.Tensor] = []
        with isolated_rng(derived_seed(seed, "dropout")):
            for epoch in range(num_epochs):
                order = public_order(len(self.labelled), derived_seed(seed, "epoch", epoch))
                losses = [
                    self.student.step(
                        self.student.loss(self.student.collate([self.labelled[int(row)] for row in batch]))
                    )
                    for batch in order.split(self.batch_size)
                ]
        return float(torch.stack(losses).mean())

    def fit(self, targets: torch.Tensor | PackedRows, loss: Loss, num_epochs: int, round: int) -> float:
        """
        Train the server's model on targets of all public rows. [`~DistillationServer.prepare`] comes first.

        Args:
            targets (`torch.Tensor` or `PackedRows`): Of shape `(rows, classes)`.
            loss (`Callable`): `loss(logits, targets)` of a batch, a scalar.
            num_epochs (`int`): Passes over the rows.
            round (`int`): Round number, from 0.

        Returns:
            `float`: The mean loss of the last epoch.
        """
        seed = derived_seed(self.seed, "server distillation", round)
        return self.student.fit(torch.arange(self.num_rows), targets, loss, num_epochs, seed)

    def train_step(
        self, inputs: dict[str, Any], loss: Callable[[torch.Tensor], torch.Tensor], purpose: tuple[int, ...]
    ) -> torch.Tensor:
        """
        One step of the server's model on a batch, with dropout. The optimizer must have been prepared.

        Args:
            inputs (`dict[str, Any]`): The batch, as the model takes it.
            loss (`Callable`): `loss(logits)`, a scalar.
            purpose (`tuple[int, ...]`): What the step is for; dropout follows from it.

        Returns:
            `torch.Tensor`: The loss, detached.
        """
        self.student.model.train()
        with isolated_rng(derived_seed(self.seed, "server step", *purpose)):
            logits = self.student.forward(inputs)
        return self.student.step(loss(logits))

    def labelled_batch(self, size: int, *purpose: str | int) -> dict[str, Any]:
        """
        Labelled rows drawn without replacement, as the server's model takes them, with `labels`.

        Args:
            size (`int`): How many, at most all.
            purpose (`str` or `int`): What they are drawn for; the same draws the same rows.
        """
        assert self.labelled is not None, "checked when the trainer was built"
        rows = public_order(len(self.labelled), derived_seed(self.seed, "labelled rows", *purpose))[:size]
        return self.student.collate([self.labelled[int(row)] for row in rows])
