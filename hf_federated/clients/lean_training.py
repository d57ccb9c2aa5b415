"""Lean training: the local training of a client without the machinery of `Trainer.train()`.

`Trainer.train()` prepares a data loader, an optimizer and a schedule with accelerate, and calls a list of callbacks
several times in each step. For a model of a few thousand parameters, this takes longer than the training steps. The
loop here calls `compute_loss`, the optimizer and the schedule of the trainer directly. It computes the same bits:
parameters, optimizer state, position of the sampler, and logged values. `reason_for_trainer` (`lean_rules.py`) sends
every customized training to `Trainer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import send_to_device
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Sampler, SequentialSampler
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from .._compat import remove_unused_columns
from ..methods import ClientPart
from ..utils.random import seed_generators
from .lean_loader import LeanLoader
from .lean_optimizer import LeanOptimizers, Schedule
from .lean_rules import reason_for_trainer
from .resident_rows import RESIDENT_ROWS


logger = logging.get_logger(__name__)

# The name of the lean loop in counts of trainings.
LEAN = "lean"


class LeanTraining:
    """
    Runs local trainings without `Trainer.train()`.

    Args:
        keeps_optimizers (`bool`): Whether clients keep the state of their optimizer between rounds.

    Attributes:
        counts (`dict[str, int]`): Number of trainings so far: `"lean"`, and by the reason for the loop of `Trainer`.
    """

    def __init__(self, keeps_optimizers: bool) -> None:
        self.counts: dict[str, int] = {}
        self._classes: dict[type, str | None] = {}
        self._optimizers = LeanOptimizers(keeps_optimizers)

    def takes(
        self, trainer: Any, args: TrainingArguments, parts: Sequence[ClientPart], callbacks: Sequence[TrainerCallback]
    ) -> bool:
        """Whether the lean loop gives the bits of `Trainer.train()`. If not, the reason is counted and logged once."""
        reason = reason_for_trainer(trainer, args, parts, callbacks, self._classes)
        if reason is not None and reason not in self.counts:
            logger.info(f"Clients train in the loop of `Trainer`: {reason}.")
        self.counts[reason or LEAN] = self.counts.get(reason or LEAN, 0) + 1
        return reason is None

    def train(self, trainer: Any, seed: int | None, callbacks: Sequence[TrainerCallback] = ()) -> None:
        """
        Train a client as `Trainer.train` does, with the same bits.

        Args:
            trainer (`transformers.Trainer`): The trainer of the client, from
                [`~hf_federated.clients.local_training.local_trainer`]. Its optimizer, state and log are set as after
                a call of `train`.
            seed (`int`, *optional*): Seed of the client's global generators. By default they are not seeded.
            callbacks (`Sequence[TrainerCallback]`, *optional*): Callbacks whose only event is `on_step_end`.
        """
        loader = trainer.local_training.count_epochs_over_run(_client_loader(trainer), trainer.args)
        loop = _Loop(trainer, loader, callbacks)
        schedule = self._optimizers.start(trainer, loop.parameters, loop.max_steps)
        if seed is not None:
            seed_generators(seed)
        loop.run(schedule)


def _client_loader(trainer: Any) -> LeanLoader:
    """Return the batches of a client, in the order of the data loader of `Trainer`."""
    args, accelerator, collator = trainer.args, trainer.accelerator, trainer.data_collator
    rows = remove_unused_columns(trainer, trainer.train_dataset, "training")
    if args.train_sampling_strategy == "sequential":
        sampler: Sampler[int] = SequentialSampler(rows)
    else:
        sampler = SeedableRandomSampler(rows, data_seed=accelerator.dataloader_config.data_seed)

    def collate(batches: Iterator[list[int]]) -> Iterator[Any]:
        if rows.format["type"] != "custom":
            return RESIDENT_ROWS.batches(rows, batches, collator)
        # A transform can depend on the examples that are read together.
        return (collator(rows.__getitems__(positions)) for positions in batches)

    def read(batches: Iterator[list[int]]) -> Iterator[Any]:
        device = accelerator.device
        collated = collate(batches)
        return collated if device.type == "cpu" else (send_to_device(batch, device) for batch in collated)

    return LeanLoader(rows, read, sampler, args.train_batch_size, args.dataloader_drop_last)


class _Loop:
    """
    The steps of one local training, in the order of `Trainer._inner_training_loop` and `Trainer._run_epoch`.

    Args:
        trainer (`transformers.Trainer`): The trainer of the client.
        loader ([`~hf_federated.clients.local_training.EpochOffsetLoader`]): The batches of the client.
        callbacks (`Sequence[TrainerCallback]`): Callbacks whose only event is `on_step_end`.
    """

    def __init__(self, trainer: Any, loader: Any, callbacks: Sequence[TrainerCallback]) -> None:
        self._trainer, self._loader, self._callbacks = trainer, loader, callbacks
        # An epoch that the client has begun in its last round shortens steps (`SamplerPosition`).
        self._args = trainer.args
        lengths = trainer.set_initial_training_values(trainer.args, loader)
        self._num_epochs, self._steps_per_epoch, *_, self._batches_per_epoch, self.max_steps = lengths
        self.parameters = list(trainer.model.parameters())
        self._clears_gradients = getattr(trainer.model.zero_grad, "__func__", None) is nn.Module.zero_grad
        self._divides_loss = trainer.accelerator.gradient_accumulation_steps != 1
        self._loss = torch.tensor(0.0, device=trainer.args.device)
        self._rate = self._logged_rate = 0.0
        self._main_input = getattr(trainer.model, "main_input_name", "input_ids")
        # As in `Trainer`, the number of operations is proportional to the number of tokens.
        self._flos = 0.0
        self._flos_per_token = trainer.floating_point_ops({self._main_input: torch.empty(1)})

    def run(self, schedule: Schedule) -> None:
        """Run the steps. The trainer's state and log are then those of `Trainer.train`."""
        trainer, started = self._trainer, time.time()
        self._schedule = schedule
        trainer.state.max_steps = self.max_steps
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer.model.train()
        self._zero_grad()
        self._rate = self._schedule(0)
        for epoch in range(self._num_epochs):
            num_batches, grad_norm = self._run_epoch(epoch)
            if trainer.state.global_step >= self.max_steps:
                self._log(grad_norm, started)
            if trainer.state.global_step >= self.max_steps or not num_batches:
                break
        trainer.state.total_flos = self._flos
        trainer.is_in_train = False

    def _run_epoch(self, epoch: int) -> tuple[int, Any]:
        """Run the steps of an epoch. Return its number of batches, and the gradient norm of the last step."""
        trainer, args, state = self._trainer, self._args, self._trainer.state
        self._loader.set_epoch(epoch)
        batches = iter(self._loader)
        remainder = self._batches_per_epoch % args.gradient_accumulation_steps or args.gradient_accumulation_steps
        num_batches, grad_norm = 0, None
        for number in range(self._steps_per_epoch):
            wanted = remainder if number == self._steps_per_epoch - 1 else args.gradient_accumulation_steps
            samples, num_items = trainer.get_batch_samples(batches, wanted, args.device)
            trainer.current_gradient_accumulation_steps = len(samples)
            for inputs in samples:
                num_batches += 1
                ends_epoch = num_batches == self._batches_per_epoch
                ends_step = num_batches % args.gradient_accumulation_steps == 0 or ends_epoch
                trainer.accelerator.sync_gradients = ends_step
                self._add_loss(self._training_step(inputs, num_items))
                if self._main_input in inputs:
                    self._flos += float(self._flos_per_token * inputs[self._main_input].numel())
                if args.include_num_input_tokens_seen != "no":
                    trainer._track_num_input_tokens(inputs)
                if ends_step:
                    grad_norm = self._step()
                    state.epoch = epoch + num_batches / self._batches_per_epoch
                    for callback in self._callbacks:
                        callback.on_step_end(args, state, trainer.control)
                    if state.global_step >= self.max_steps:
                        return num_batches, grad_norm
        return num_batches, grad_norm

    def _training_step(self, inputs: Any, num_items: Any) -> torch.Tensor:
        """Add the gradients of a micro-batch to `.grad` and return its loss, as `Trainer.training_step`."""
        trainer = self._trainer
        if self._divides_loss or trainer.current_gradient_accumulation_steps != 1 or not inputs:
            return trainer.training_step(trainer.model, inputs, num_items)
        # `training_step` sets the mode of the model, copies the batch and divides the loss by 1.
        trainer.local_training.on_batch(trainer.model, inputs, num_items)
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=num_items)
        loss.backward()
        trainer.local_training.on_gradients(trainer)
        return loss.detach()

    def _add_loss(self, loss: torch.Tensor) -> None:
        if self._args.logging_nan_inf_filter and not math.isfinite(loss.item()):
            # `Trainer` counts the mean of the other losses for a loss that is not finite.
            self._loss += self._loss / (1 + self._trainer.state.global_step)
        else:
            self._loss += loss

    def _step(self) -> torch.Tensor:
        """Clip the gradients and update the parameters. Return the norm of the gradients before clipping."""
        trainer, limit = self._trainer, self._args.max_grad_norm
        # The order of the parameters of the model. The order of the optimizer's groups gives another rounding error.
        grad_norm = clip_grad_norm_(self.parameters, limit if limit is not None and limit > 0 else math.inf)
        trainer.optimizer.step()
        trainer.state.global_step += 1
        self._logged_rate, self._rate = self._rate, self._schedule(trainer.state.global_step)
        self._zero_grad()
        return grad_norm

    def _zero_grad(self) -> None:
        if not self._clears_gradients:
            self._trainer.model.zero_grad()
            return
        for parameter in self.parameters:
            parameter.grad = None

    def _log(self, grad_norm: torch.Tensor, started: float) -> None:
        """Log what `Trainer` logs in its last step."""
        state = self._trainer.state
        logs = {
            "loss": self._loss.item() / state.global_step,
            "grad_norm": grad_norm.item(),
            "learning_rate": self._logged_rate,
        }
        self._trainer.log(logs, started)
