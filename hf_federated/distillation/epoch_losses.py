"""A client's mean loss of every local epoch, which some methods weigh clients by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..utils.random import isolated_rng


class EpochLosses(TrainerCallback):
    """
    Inside a client: lets the log have an entry at the end of every local epoch, and finds its mean loss of a batch.

    That is the loss of the log, but where the trainer adds up the losses of accumulated batches: it takes a model that
    accepts a number of items for one that divides by it, which many do not, and leaves the division out. The same
    number then lets it multiply by the processes that share a batch.
    """

    def __init__(self) -> None:
        self._num_batches = self._num_steps = 0
        # Of each entry of the log, its batches over its steps.
        self._batches_per_step: list[float] = []
        # What the trainer's loss of a batch is of the batch's mean, where it does not divide by a number of items.
        self._scale: float | None = None
        self._is_tested = False

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._num_batches += 1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._num_batches += 1
        self._num_steps += 1

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_log = state.global_step < state.max_steps

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self._batches_per_step.append(self._num_batches / max(1, self._num_steps))
            self._num_batches = self._num_steps = 0

    def on_batch(self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        """
        Called before a batch's loss is computed; the first one of which a number of items is known is tried out.

        Args:
            trainer (`transformers.Trainer`): The client's, amid a step.
            model (`torch.nn.Module`): As the step has it.
            inputs (`Mapping[str, Any]`): The batch.
            num_items (`torch.Tensor` or `int`, *optional*): Items of all batches of the step.
        """
        adds_up = _adds_losses_of_micro_batches(trainer) and getattr(trainer, "loss_is_scaled_for_ga", None) is None
        if self._is_tested or num_items is None or not adds_up:
            return
        self._is_tested = True
        if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
            return
        inputs = trainer._prepare_inputs(inputs)
        losses = []
        num_items = torch.as_tensor(num_items)
        for items in ({}, {"num_items_in_batch": num_items}, {"num_items_in_batch": 2 * num_items}):
            with torch.no_grad(), trainer.compute_loss_context_manager(), isolated_rng(0):
                losses.append(float(trainer.compute_loss(model, dict(inputs), **items).mean()))
        plain, once, doubled = losses
        # A loss that is divided would be half of it.
        if plain and math.isclose(once, doubled, rel_tol=0.1):
            self._scale = once / plain

    def mean_batch_losses(self, losses: list[float]) -> list[float]:
        """
        Mean losses of a batch.

        Args:
            losses (`list[float]`): Those of the log's entries, in their order.
        """
        if self._scale is None:
            return losses
        return [loss / (per_step * self._scale) for loss, per_step in zip(losses, self._batches_per_step, strict=True)]


def _adds_losses_of_micro_batches(trainer: Trainer) -> bool:
    """Whether a step has several batches, one after the other or in several processes."""
    return trainer.args.gradient_accumulation_steps > 1 or trainer.accelerator.num_processes > 1
