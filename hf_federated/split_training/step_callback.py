"""How the training loop of `Trainer` runs the steps of a split trainer."""

from __future__ import annotations

import copy
from typing import Any, Protocol

from transformers import TrainerCallback, TrainingArguments


class SplitTraining(Protocol):
    """The methods of a split trainer that the training loop calls through a callback."""

    def start_training(self) -> None:
        """Prepare the first step."""

    def end_step(self) -> None:
        """Finish a step after the optimizers."""

    def sync_model(self) -> None:
        """Copy the trained parameters into the model."""


def step_arguments(args: TrainingArguments) -> TrainingArguments:
    """Return the arguments for the loop of `Trainer` when each item of the data loader is an optimizer step."""
    loop_args = copy.copy(args)
    loop_args.gradient_accumulation_steps = 1
    # The joint optimizer clips the gradients.
    loop_args.max_grad_norm = 0.0
    loop_args.include_num_input_tokens_seen = "no"
    loop_args.save_total_limit = None
    return loop_args


class StepCallback(TrainerCallback):
    """Callback that runs the federation's part of a step before other callbacks see the model."""

    def __init__(self, trainer: SplitTraining) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.start_training()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.end_step()

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._trainer.sync_model()
