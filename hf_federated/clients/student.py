"""`Student`: a model that learns from predictions on public rows.

The server's model is one, and so is each client's own. Its optimizer and its learning-rate curve last for the run:
an optimizer made anew for every batch would take steps of the learning rate's length whatever the gradient.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer

from ..messages import public_order
from ..tasks.base import NUM_POSITIONS
from ..utils.random import derived_seed, isolated_rng
from .features import pooled_features
from .local_training import place_schedule
from .positions import Positions


# Columns that a public row loses: what it is distilled from is predictions.
LABEL_COLUMNS = ("label", "labels", "label_ids")

# Among the inputs of a batch, where in it the model is asked: bool, of shape `(rows, length)`.
ASKED = "asked_positions"


class Rows(Protocol):
    """
    What a tensor of shape `(rows, classes)` is to somebody who takes one batch of its rows after the other.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.clients.student import Rows

    >>> rows: Rows = torch.eye(3)
    >>> len(rows), rows[torch.tensor([2])]
    (3, tensor([[0., 0., 1.]]))
    ```
    """

    def __len__(self) -> int: ...

    def __getitem__(self, places: torch.Tensor, /) -> torch.Tensor: ...


class Student:
    """
    A trainer's model over the public rows, with an optimizer of its own.

    Args:
        trainer (`transformers.Trainer`):
            Its model, arguments, collator and optimizer are used; it is not changed.
        public (`datasets.Dataset`, *optional*):
            The public rows, encoded for this model, where there are any. Label columns are dropped.
        learning_rate (`float`, *optional*):
            Instead of that of the arguments.
        positions ([`~hf_federated.clients.positions.Positions`], *optional*):
            Where in a public row the model predicts; by default once a row. The public rows then have `labels`, −100
            but at these places. "Rows" of predictions below are positions.
    """

    def __init__(
        self,
        trainer: Trainer,
        public: Dataset | None,
        learning_rate: float | None = None,
        positions: Positions | None = None,
    ) -> None:
        # A shallow copy, on which an optimizer can be created without a trace.
        self._trainer = copy.copy(trainer)
        self._trainer.optimizer = None
        self._trainer.lr_scheduler = None
        self._trainer._created_lr_scheduler = False
        if learning_rate is not None:
            self._trainer.args = copy.copy(trainer.args)
            self._trainer.args.learning_rate = learning_rate
        self.positions = positions
        if positions is None:
            self._public = None if public is None else self._without_labels(public)
        else:
            assert public is not None
            self._public = self.select_columns(public.remove_columns(NUM_POSITIONS))
        self.num_rows = 0 if public is None else len(public)
        self._state: dict[str, Any] | None = None

    def select_columns(self, rows: Dataset) -> Dataset:
        """Rows with those columns only that the model takes."""
        self._trainer._set_signature_columns_if_needed()
        return self._trainer._remove_unused_columns(rows, "public")

    def _without_labels(self, rows: Dataset) -> Dataset:
        labels = sorted({*LABEL_COLUMNS, *self._trainer.label_names} & set(rows.column_names))
        return self.select_columns(rows.remove_columns(labels))

    @property
    def model(self) -> nn.Module:
        """The model itself, not wrapped for several processes."""
        return self._trainer.model

    @functools.cached_property
    def num_classes(self) -> int:
        """Classes that the model tells apart."""
        config: Any = self.model.config
        if not self.num_rows:
            return int(config.num_labels)
        positions = self.positions
        try:
            # Whatever the exchange that runs is about.
            self.positions = None if positions is None else positions.copy()
            shape = self.predict([0 if positions is None else positions.first_row()]).shape
        finally:
            self.positions = positions
        if len(shape) != 2:
            raise ValueError(
                f"The model's prediction of a public row has the shape {tuple(shape[1:])}, expected one number for "
                "each class. What is predicted at words or tokens is known to a task: give the trainer raw rows and a "
                "`task`, such as SequenceTagging or LanguageModeling."
            )
        return shape[-1]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._trainer.args.device

    @property
    def batch_size(self) -> int:
        """Rows of a training step."""
        return self._trainer.args.per_device_train_batch_size

    def inputs(self, rows: Sequence[int] | torch.Tensor) -> dict[str, Any]:
        """
        Public rows as the model takes them.

        Args:
            rows (`Sequence[int]`): Row numbers.

        Raises:
            ValueError: If the collator does not keep labels in their places, where the model predicts there.
        """
        assert self._public is not None
        inputs = self.collate([self._public[int(row)] for row in rows])
        if self.positions is None:
            return inputs
        marks = inputs["labels"] if self.positions.feeds_labels else inputs.pop("labels")
        asked = marks >= 0
        agreed = self.positions.agreed_among_seen(rows)
        if int(asked.sum()) != len(agreed):
            raise ValueError(
                f"{type(self._trainer.data_collator).__name__} makes {int(asked.sum())} labels of {len(agreed)} in "
                f"{len(rows)} public rows: it must pad labels with -100 and leave them where they are, as "
                "`data_collator` of the task does. Leave yours out."
            )
        asked[asked.clone()] = agreed.to(asked.device)
        return {**inputs, ASKED: asked}

    def collate(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Encoded rows as the model takes them, on its device."""
        return self._trainer._prepare_inputs(self._trainer.data_collator(features))

    @property
    def processing_class(self) -> Any:
        """The model's tokenizer, if the trainer has one."""
        return self._trainer.processing_class

    def forward(self, inputs: dict[str, Any], model: nn.Module | None = None) -> torch.Tensor:
        """
        Logits of a batch, in float32 or wider.

        Args:
            inputs (`dict[str, Any]`): From [`~Student.inputs`].
            model (`torch.nn.Module`, *optional*): Another model to ask, in the same precision.

        Returns:
            `torch.Tensor`: Of shape `(rows, classes)`.

        Raises:
            ValueError: If the model is asked at places of its inputs, and predicts at others.
        """
        asked = inputs.get(ASKED)
        taken = {name: value for name, value in inputs.items() if name != ASKED}
        with self._trainer.compute_loss_context_manager():
            logits = (self.model if model is None else model)(**taken).logits
        if asked is not None:
            if logits.shape[:-1] != asked.shape:
                raise ValueError(
                    f"The model predicts at places of shape {tuple(logits.shape[:-1])}, and its inputs have the shape "
                    f"{tuple(asked.shape)}. Distillation at tokens does not go with adapters that put virtual tokens "
                    "before the inputs (prompt tuning, p-tuning); LoRA and prefix tuning do."
                )
            logits = logits[asked]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """
        The loss of a batch with labels, as the model computes it.

        Args:
            inputs (`dict[str, Any]`): From [`~Student.collate`], with `labels`.
        """
        with self._trainer.compute_loss_context_manager():
            return self.model(**inputs).loss

    def predict(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Logits of public rows, without dropout.

        Args:
            rows (`Sequence[int]`): Row numbers.

        Returns:
            `torch.Tensor`: Of shape `(rows, classes)`, on the CPU.
        """
        return torch.cat(self.predict_batches(rows, lambda logits: logits))

    def predict_batches(self, rows: Sequence[int] | torch.Tensor, each: Callable[[torch.Tensor], Any]) -> list[Any]:
        """
        What is made of the logits of each batch, where all together are too many to keep.

        Args:
            rows (`Sequence[int]`): Row numbers.
            each (`Callable`): Of logits of shape `(rows, classes)` on the CPU, of one batch; of none, once, where
                there is nothing to predict.
        """
        asked = self.with_positions(rows)
        if not len(asked):
            return [each(torch.empty(0, self.num_classes))]
        return self._evaluate(len(asked), lambda batch: each(self.forward(self.inputs(asked[batch])).cpu()))

    def with_positions(self, rows: Sequence[int] | torch.Tensor) -> Sequence[int] | torch.Tensor:
        """Those of some rows at which the exchange is about anything: the others never reach the model."""
        return rows if self.positions is None else self.positions.with_any(rows)

    def features(self, rows: Dataset | None = None) -> torch.Tensor:
        """
        What the model makes of rows below its head, without dropout ([`~hf_federated.clients.features`]).

        Args:
            rows (`datasets.Dataset`, *optional*): Encoded rows of which labels are not looked at; the public ones by
                default.

        Returns:
            `torch.Tensor`: Of shape `(rows, features)`, on the CPU.
        """
        encoded = self._public if rows is None else self._without_labels(rows)
        assert encoded is not None

        def of_batch(batch: slice) -> torch.Tensor:
            inputs = self.collate([encoded[row] for row in range(len(encoded))[batch]])
            with self._trainer.compute_loss_context_manager():
                return pooled_features(self.model, inputs).cpu()

        return torch.cat(self._evaluate(len(encoded), of_batch))

    @torch.no_grad()
    def _evaluate(self, num_rows: int, of_batch: Callable[[slice], Any]) -> list[Any]:
        """What the model says of rows in evaluation mode, batch by batch."""
        was_training = self.model.training
        self.model.eval()
        size = self._trainer.args.per_device_eval_batch_size
        try:
            return [of_batch(slice(start, start + size)) for start in range(0, num_rows, size)]
        finally:
            self.model.train(was_training)

    def prepare(self, num_training_steps: int, position: int = 0) -> None:
        """
        Make the optimizer and its schedule, once, and move the schedule to a place in the run, if it is not there yet:
        a client that was not asked for some rounds goes on where the others are.

        Args:
            num_training_steps (`int`): Steps of the whole run.
            position (`int`, *optional*, defaults to `0`): Steps before this one.
        """
        self._make_optimizer(num_training_steps)
        place_schedule(self._trainer.lr_scheduler, position)

    def _make_optimizer(self, num_training_steps: int) -> None:
        if self._trainer.optimizer is not None:
            return
        trainer = self._trainer
        trainer.create_optimizer()
        trainer.create_scheduler(num_training_steps, trainer.optimizer)
        if self._state is not None:
            trainer.optimizer.load_state_dict(self._state["optimizer"])
            trainer.lr_scheduler.load_state_dict(self._state["scheduler"])
            self._state = None

    def step(self, loss: torch.Tensor) -> torch.Tensor:
        """
        One optimizer step down the gradient of a loss, clipped as the arguments say. [`~Student.prepare`] comes first.

        Args:
            loss (`torch.Tensor`): A scalar of this model's outputs.

        Returns:
            `torch.Tensor`: The loss, detached.

        Raises:
            FloatingPointError: If the loss or its gradient is not finite. Model and optimizer are as they were.
        """
        trainer = self._trainer
        try:
            loss.backward()
            parameters = [item for group in trainer.optimizer.param_groups for item in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, trainer.args.max_grad_norm or math.inf)
            # An optimizer that has seen a NaN once has it in its moments forever.
            if not bool(norm.isfinite() & loss.detach().isfinite()):
                raise FloatingPointError(
                    f"A distillation step has the loss {float(loss)} and a gradient of norm {float(norm)}. Lower its "
                    "learning rate (`server_lr`, `client_lr`) or clip gradients "
                    "(`max_grad_norm`); a loss on labelled rows is NaN where none of them has a label."
                )
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
        finally:
            self.model.zero_grad()
        return loss.detach()

    def fit(
        self,
        rows: torch.Tensor,
        targets: Rows,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        num_epochs: int,
        seed: int,
    ) -> float:
        """
        Train on targets of public rows, in batches drawn anew in every epoch.

        Args:
            rows (`torch.Tensor`): Row numbers, of shape `(rows,)`.
            targets (`torch.Tensor`): What to learn of each, of shape `(rows, classes)`. Batches are of whole rows, and
                one without any positions is no step.
            loss (`Callable`): `loss(logits, targets)` of a batch, a scalar.
            num_epochs (`int`): Passes over the rows.
            seed (`int`): Of the batches and of dropout.

        Returns:
            `float`: The mean loss of the last epoch's steps.
        """
        self.model.train()
        losses: list[torch.Tensor] = []
        place_of = None
        if self.positions is not None:
            place_of = self.positions.places_among(rows)
        with isolated_rng(derived_seed(seed, "dropout")):
            for epoch in range(num_epochs):
                losses = []
                for batch in public_order(len(rows), derived_seed(seed, "epoch", epoch)).split(self.batch_size):
                    asked = self.with_positions(rows[batch])
                    if not len(asked):
                        continue
                    if self.positions is not None and place_of is not None:
                        batch = place_of[self.positions.agreed_of(asked)]
                    logits = self.forward(self.inputs(asked))
                    losses.append(self.step(loss(logits, targets[batch].to(logits.device))))
        return float(torch.stack(losses).mean())

    def state_dict(self) -> dict[str, Any]:
        """The optimizer and its schedule, `{}` before the first step."""
        if self._state is not None:
            return self._state
        if self._trainer.optimizer is None:
            return {}
        return {
            "optimizer": self._trainer.optimizer.state_dict(),
            "scheduler": self._trainer.lr_scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, before the first step."""
        self._state = state or None
