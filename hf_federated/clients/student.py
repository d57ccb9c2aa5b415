"""`Student`: a model that learns from predictions on public examples.

The server's model is a student, and so is the own model of each client. The optimizer and the learning-rate schedule
of a student last for the whole run. A new optimizer for every batch would make each step as long as the learning rate,
independent of the gradient.
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

from .._compat import prepare_inputs, remove_unused_columns
from ..messages import public_order
from ..tasks.base import NUM_POSITIONS
from ..utils.random import derived_seed, isolated_rng
from .features import pooled_features
from .gradient_scaler import copy_scaler
from .local_training import place_schedule
from .positions import Positions
from .resident_rows import RESIDENT_ROWS


# Label columns, which are dropped from public examples: students learn from predictions only.
LABEL_COLUMNS = ("label", "labels", "label_ids")

# Key of the prediction mask in the inputs of a batch: bool, of shape `(batch_size, length)`.
PREDICTION_MASK = "prediction_mask"


class Targets(Protocol):
    """
    Targets of shape `(examples, classes)` that are read in batches.

    They are a tensor, or an object that computes batches on access.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.clients.student import Targets

    >>> targets: Targets = torch.eye(3)
    >>> len(targets), targets[torch.tensor([2])]
    (3, tensor([[0., 0., 1.]]))
    ```
    """

    def __len__(self) -> int: ...

    def __getitem__(self, indices: torch.Tensor, /) -> torch.Tensor: ...


class Student:
    """
    A trainer's model on the public examples, with its own optimizer.

    Args:
        trainer (`transformers.Trainer`):
            Its model, arguments, data collator and optimizer class are used. The trainer is not changed.
        public (`datasets.Dataset`, *optional*):
            The public examples, encoded for this model. Label columns are dropped.
        learning_rate (`float`, *optional*):
            Replaces the learning rate of the training arguments.
        positions ([`~hf_federated.clients.positions.Positions`], *optional*):
            The positions of public examples at which the model predicts. By default it makes one prediction per
            example. With positions, the public examples need a column `labels` that is −100 except at these positions,
            and the first dimension of predictions and targets below counts positions instead of examples.
    """

    def __init__(
        self,
        trainer: Trainer,
        public: Dataset | None,
        learning_rate: float | None = None,
        positions: Positions | None = None,
    ) -> None:
        # Create the optimizer on a shallow copy, so that the trainer stays unchanged.
        self._trainer = copy.copy(trainer)
        self._trainer.optimizer = None
        self._trainer.lr_scheduler = None
        self._trainer._created_lr_scheduler = False
        self._scaler = copy_scaler(trainer.accelerator)
        if learning_rate is not None:
            self._trainer.args = copy.copy(trainer.args)
            self._trainer.args.learning_rate = learning_rate
        self.positions = positions
        self.num_rows = 0 if public is None else len(public)
        if public is None:
            self._public = Dataset.from_dict({})
        elif positions is None:
            self._public = self._without_labels(public)
        else:
            self._public = self.select_columns(public.remove_columns(NUM_POSITIONS))
        self._state: dict[str, Any] | None = None

    def select_columns(self, rows: Dataset) -> Dataset:
        """Drop the columns that the model does not accept."""
        return remove_unused_columns(self._trainer, rows, "public")

    def _without_labels(self, rows: Dataset) -> Dataset:
        labels = sorted({*LABEL_COLUMNS, *self._trainer.label_names} & set(rows.column_names))
        return self.select_columns(rows.remove_columns(labels))

    @property
    def model(self) -> nn.Module:
        """The model, without the wrapper for distributed training."""
        return self._trainer.model

    @functools.cached_property
    def num_classes(self) -> int:
        """Number of classes of the model."""
        config: Any = self.model.config
        if not self.num_rows:
            return int(config.num_labels)
        positions = self.positions
        try:
            # Count the classes independently of the agreed positions of the current exchange.
            self.positions = None if positions is None else positions.copy()
            shape = self.predict([0 if positions is None else positions.first_seen_row()]).shape
        finally:
            self.positions = positions
        if len(shape) != 2:
            raise ValueError(
                f"The model's prediction for a public example has the shape {tuple(shape[1:])}, but it must be one "
                "number per class. To distill predictions of words or tokens, pass raw examples and a `task` such as "
                "SequenceTagging or LanguageModeling to the trainer."
            )
        return shape[-1]

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._trainer.args.device

    @property
    def batch_size(self) -> int:
        """Number of examples per training step."""
        return self._trainer.args.per_device_train_batch_size

    def inputs(self, rows: Sequence[int] | torch.Tensor) -> dict[str, Any]:
        """
        Return public examples as model inputs.

        Args:
            rows (`Sequence[int]`): Indices of public examples.

        Raises:
            ValueError: If the student has positions and the data collator moves or drops labels.
        """
        inputs = self.collate(self._public, rows)
        if self.positions is None:
            return inputs
        labels = inputs["labels"] if self.positions.feeds_labels else inputs.pop("labels")
        mask = labels >= 0
        agreed = self.positions.agreed_among_seen(rows)
        if int(mask.sum()) != len(agreed):
            raise ValueError(
                f"{type(self._trainer.data_collator).__name__} returned {int(mask.sum())} labels for {len(rows)} "
                f"public examples with {len(agreed)} labels. A data collator must pad labels with -100 and must not "
                "move them. Leave out `data_collator` to use the collator of the task."
            )
        mask[mask.clone()] = agreed.to(mask.device)
        return {**inputs, PREDICTION_MASK: mask}

    def collate(self, examples: Dataset, rows: Sequence[int] | torch.Tensor) -> dict[str, Any]:
        """
        Return encoded examples as model inputs on the model's device.

        Args:
            examples (`datasets.Dataset`): Encoded examples. Their tensors are kept, see
                [`~hf_federated.clients.resident_rows.ResidentRows`].
            rows (`Sequence[int]`): Indices of examples.
        """
        return prepare_inputs(self._trainer, RESIDENT_ROWS.batch(examples, rows, self._trainer.data_collator))

    @property
    def processing_class(self) -> Any:
        """The model's tokenizer, or `None` if the trainer has no tokenizer."""
        return self._trainer.processing_class

    def forward(self, inputs: dict[str, Any], model: nn.Module | None = None) -> torch.Tensor:
        """
        Compute the logits of a batch, in float32 or wider.

        Args:
            inputs (`dict[str, Any]`): Model inputs from [`~Student.inputs`].
            model (`torch.nn.Module`, *optional*): Another model to run in the same precision.

        Returns:
            `torch.Tensor`: Logits of shape `(examples, classes)`.

        Raises:
            ValueError: If the student has positions and the model's predictions are not aligned with its inputs.
        """
        mask = inputs.get(PREDICTION_MASK)
        model_inputs = {name: value for name, value in inputs.items() if name != PREDICTION_MASK}
        with self._trainer.compute_loss_context_manager():
            logits = (self.model if model is None else model)(**model_inputs).logits
        if mask is not None:
            if logits.shape[:-1] != mask.shape:
                raise ValueError(
                    f"The model's predictions have the shape {tuple(logits.shape[:-1])}, but its inputs have the "
                    f"shape {tuple(mask.shape)}. Distillation of tokens does not support adapters that add virtual "
                    "tokens to the inputs (prompt tuning, p-tuning). Use LoRA or prefix tuning."
                )
            logits = logits[mask]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """
        Compute the model's loss on a batch with labels.

        Args:
            inputs (`dict[str, Any]`): Model inputs from [`~Student.collate`], with `labels`.
        """
        with self._trainer.compute_loss_context_manager():
            return self.model(**inputs).loss

    def predict(self, rows: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """
        Compute the logits of public examples, without dropout.

        Args:
            rows (`Sequence[int]`): Indices of public examples.

        Returns:
            `torch.Tensor`: Logits of shape `(examples, classes)`, on the CPU.
        """
        return torch.cat(self.predict_batches(rows, lambda logits: logits))

    def predict_batches(self, rows: Sequence[int] | torch.Tensor, each: Callable[[torch.Tensor], Any]) -> list[Any]:
        """
        Apply a function to the logits of each batch, without keeping all logits in memory.

        Args:
            rows (`Sequence[int]`): Indices of public examples.
            each (`Callable`): Function of the logits of one batch, of shape `(examples, classes)`, on the CPU. If
                there is no position to predict, it is called once with empty logits.

        Returns:
            `list`: The results of `each`, one per batch.
        """
        selected = self.with_positions(rows)
        if not len(selected):
            return [each(torch.empty(0, self.num_classes))]
        return self._evaluate(len(selected), lambda batch: each(self.forward(self.inputs(selected[batch])).cpu()))

    def with_positions(self, rows: Sequence[int] | torch.Tensor) -> Sequence[int] | torch.Tensor:
        """Return the examples with at least one agreed position. The other examples are not run through the model."""
        return rows if self.positions is None else self.positions.rows_with_agreed(rows)

    def features(self, rows: Dataset | None = None) -> torch.Tensor:
        """
        Compute the features of examples, without dropout. See [`~hf_federated.clients.features`].

        Args:
            rows (`datasets.Dataset`, *optional*): Encoded examples, whose labels are dropped. By default the public
                examples.

        Returns:
            `torch.Tensor`: Features of shape `(examples, features)`, on the CPU.
        """
        encoded = self._public if rows is None else self._without_labels(rows)

        def process_batch(batch: slice) -> torch.Tensor:
            inputs = self.collate(encoded, range(len(encoded))[batch])
            with self._trainer.compute_loss_context_manager():
                return pooled_features(self.model, inputs).cpu()

        return torch.cat(self._evaluate(len(encoded), process_batch))

    @torch.no_grad()
    def _evaluate(self, num_rows: int, process_batch: Callable[[slice], Any]) -> list[Any]:
        """Call a function on each batch, with the model in evaluation mode."""
        was_training = self.model.training
        self.model.eval()
        size = self._trainer.args.per_device_eval_batch_size
        try:
            return [process_batch(slice(start, start + size)) for start in range(0, num_rows, size)]
        finally:
            self.model.train(was_training)

    def prepare(self, num_training_steps: int, position: int = 0) -> None:
        """
        Create the optimizer and its schedule once, and advance the schedule to a step of the run.

        A client that skipped rounds thereby continues at the same step of the schedule as the other clients.

        Args:
            num_training_steps (`int`): Number of steps of the whole run.
            position (`int`, *optional*, defaults to `0`): Number of steps before the next step.
        """
        trainer = self._trainer
        if trainer.optimizer is None:
            trainer.create_optimizer()
            trainer.create_scheduler(num_training_steps, trainer.optimizer)
        if self._state is not None:
            trainer.optimizer.load_state_dict(self._state["optimizer"])
            trainer.lr_scheduler.load_state_dict(self._state["scheduler"])
            if "scaler" in self._state:
                self._scaler.load_state_dict(self._state["scaler"])
            self._state = None
        place_schedule(trainer.lr_scheduler, position)

    def step(self, loss: torch.Tensor) -> torch.Tensor:
        """
        Take one optimizer step on a loss. The gradient is clipped to `max_grad_norm`. Call [`~Student.prepare`] first.

        With `fp16=True`, the loss is scaled. If the gradients overflow, the scale is lowered, and the step changes
        neither the parameters nor the learning rate.

        Args:
            loss (`torch.Tensor`): A scalar that depends on the model's outputs.

        Returns:
            `torch.Tensor`: The loss, detached.

        Raises:
            FloatingPointError: If the loss or the gradient norm is not finite. Model and optimizer are then unchanged.
        """
        trainer, scaler = self._trainer, self._scaler
        try:
            scaler.scale(loss).backward()
            scaler.unscale_(trainer.optimizer)
            parameters = [item for group in trainer.optimizer.param_groups for item in group["params"]]
            norm = nn.utils.clip_grad_norm_(parameters, trainer.args.max_grad_norm or math.inf)
            loss = loss.detach()
            # A NaN in the moments of an optimizer would never leave them.
            if bool(norm.isfinite() & loss.isfinite()):
                scaler.step(trainer.optimizer)
                scaler.update()
                trainer.lr_scheduler.step()
            elif not self._lower_scale(loss):
                raise FloatingPointError(
                    f"A distillation step has the loss {float(loss)} and the gradient norm {float(norm)}. Lower its "
                    "learning rate (`server_lr`, `client_lr`) or clip gradients "
                    "(`max_grad_norm`). The loss on labeled examples is also NaN if no example has a label."
                )
        finally:
            self.model.zero_grad()
        return loss

    def learn(self, loss: Callable[[], torch.Tensor]) -> float:
        """
        Compute a loss and take one step on it, as [`~Student.step`].

        Args:
            loss (`Callable`): `loss()`, a scalar that depends on the model's outputs.

        Returns:
            `float`: The loss.
        """
        return float(self.step(loss()))

    def _lower_scale(self, loss: torch.Tensor) -> bool:
        """Lower the loss scale after an overflow. Return `False` if the scale is not the cause of the overflow."""
        scale = self._scaler.get_scale()
        self._scaler.update()
        return bool(loss.isfinite()) and 1.0 <= self._scaler.get_scale() < scale

    def fit(
        self,
        rows: torch.Tensor,
        targets: Targets,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        num_epochs: int,
        seed: int,
    ) -> float:
        """
        Train on targets of public examples. Every epoch shuffles the examples into new batches.

        Args:
            rows (`torch.Tensor`): Indices of public examples, of shape `(examples,)`.
            targets (`torch.Tensor`): Targets of shape `(examples, classes)`. With positions, a batch contains all
                positions of its examples, and a batch without positions is skipped.
            loss (`Callable`): Function `loss(logits, targets)` of a batch that returns a scalar.
            num_epochs (`int`): Number of passes over the examples.
            seed (`int`): Seed of the batches and of dropout.

        Returns:
            `float`: Mean loss over the steps of the last epoch.
        """
        self.model.train()
        losses: list[torch.Tensor] = []
        index_of = None if self.positions is None else self.positions.index_map(rows)
        with isolated_rng(derived_seed(seed, "dropout")):
            for epoch in range(num_epochs):
                losses = []
                for batch in public_order(len(rows), derived_seed(seed, "epoch", epoch)).split(self.batch_size):
                    selected = self.with_positions(rows[batch])
                    if not len(selected):
                        continue
                    if self.positions is not None and index_of is not None:
                        batch = index_of[self.positions.agreed_of(selected)]
                    logits = self.forward(self.inputs(selected))
                    losses.append(self.step(loss(logits, targets[batch].to(logits.device))))
        return float(torch.stack(losses).mean())

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the optimizer, its schedule and its scaler, or `{}` before the first step."""
        if self._state is not None:
            return self._state
        if self._trainer.optimizer is None:
            return {}
        state = {
            "optimizer": self._trainer.optimizer.state_dict(),
            "scheduler": self._trainer.lr_scheduler.state_dict(),
        }
        return {**state, "scaler": self._scaler.state_dict()} if self._scaler.is_enabled() else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`. Call it before the first step."""
        self._state = state or None
