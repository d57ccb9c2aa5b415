"""Mean training loss of each local epoch of a client. Some methods weigh clients by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from .._compat import prepare_inputs
from ..clients.local_training import EpochOffsetLoader
from ..utils.random import isolated_rng


class EpochLosses(TrainerCallback):
    """
    Logs the loss at the end of each local epoch, and computes the mean loss per batch from the log.

    The trainer's log usually holds this mean. It differs if the trainer sums the losses of micro-batches. If a model
    accepts a number of items, the trainer assumes that the model divides its loss by this number, and does not divide
    the sum by the number of micro-batches. Many such models do not divide. The trainer then also multiplies the loss
    by the number of processes that share a batch. The callback detects both effects and removes them.
    """

    def __init__(self) -> None:
        self._num_batches = self._num_steps = 0
        # Number of batches per step, for each entry of the log.
        self._batches_per_step: list[float] = []
        # Ratio of the trainer's loss to the mean loss of a batch, for a model that does not divide by the items.
        self._scale: float | None = None
        self._is_tested = False

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._num_batches += 1

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._num_batches += 1
        self._num_steps += 1

    def on_epoch_end(
        self, args: Any, state: TrainerState, control: TrainerControl, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        # A client that continues in an epoch reads the last batches of this epoch in another epoch of the trainer.
        continues = isinstance(train_dataloader, EpochOffsetLoader) and train_dataloader.is_within_epoch
        control.should_log = state.global_step < state.max_steps and not continues

    def on_log(self, *args: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._batches_per_step.append(self._num_batches / max(1, self._num_steps))
            self._num_batches = self._num_steps = 0

    def on_batch(self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        """
        Called before the loss of a micro-batch is computed.

        The first micro-batch with a known number of items is used to test whether the model divides its loss by this
        number.

        Args:
            trainer (`transformers.Trainer`): The client's trainer, during a step.
            model (`torch.nn.Module`): The model of the training step.
            inputs (`Mapping[str, Any]`): The micro-batch.
            num_items (`torch.Tensor` or `int`, *optional*): Number of items in all micro-batches of the step.
        """
        adds_up = _adds_losses_of_micro_batches(trainer) and getattr(trainer, "loss_is_scaled_for_ga", None) is None
        if self._is_tested or num_items is None or not adds_up:
            return
        self._is_tested = True
        if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
            return
        inputs = prepare_inputs(trainer, inputs)
        losses = []
        num_items = torch.as_tensor(num_items)
        for items in ({}, {"num_items_in_batch": num_items}, {"num_items_in_batch": 2 * num_items}):
            with torch.no_grad(), trainer.compute_loss_context_manager(), isolated_rng(0):
                losses.append(float(trainer.compute_loss(model, dict(inputs), **items).mean()))
        plain, once, doubled = losses
        # A loss that is divided by the number of items would be halved.
        if plain and math.isclose(once, doubled, rel_tol=0.1):
            self._scale = once / plain

    def mean_batch_losses(self, losses: list[float]) -> list[float]:
        """
        Convert logged losses to mean losses per batch.

        Args:
            losses (`list[float]`): Losses of the log entries, in order.
        """
        if self._scale is None:
            return losses
        return [loss / (per_step * self._scale) for loss, per_step in zip(losses, self._batches_per_step, strict=True)]


def _adds_losses_of_micro_batches(trainer: Trainer) -> bool:
    """Whether a step has several micro-batches, in sequence or in several processes."""
    return trainer.args.gradient_accumulation_steps > 1 or trainer.accelerator.num_processes > 1
