"""Stubs with which the training loop of `Trainer` runs one round as one step.

For each round, the training loop runs one epoch of one step, and `training_step` runs the round. The data loader has
no data, the optimizer has no parameters, and the schedule returns the last learning rate of the clients. Logging,
evaluation, saving, early stopping and resuming work as in `Trainer`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from .._compat import set_train_tokens
from ..utils.due_steps import DEFAULT_STEPS


def round_arguments(args: TrainingArguments, num_rounds: int) -> TrainingArguments:
    """
    Build the training arguments of the loop over rounds.

    Args:
        args (`TrainingArguments`): The user's training arguments, which are not changed.
        num_rounds (`int`): Number of rounds of the run.
    """
    outer = copy.copy(args)
    outer.num_train_epochs = float(num_rounds)
    outer.max_steps = -1
    outer.gradient_accumulation_steps = 1
    outer.max_grad_norm = 0.0
    # These arguments act on batches, which only clients process.
    outer.use_liger_kernel = False
    outer.include_num_input_tokens_seen = "no"
    # The federated trainer deletes old checkpoints itself, so that no partial checkpoint remains.
    outer.save_total_limit = None
    # A round is one epoch and one step of the loop. With the strategy "steps", the loop logs, evaluates and saves
    # before `on_epoch_end`, which ends the round.
    for kind, strategy_class in (("logging", IntervalStrategy), ("eval", IntervalStrategy), ("save", SaveStrategy)):
        if getattr(outer, f"{kind}_strategy") == strategy_class.EPOCH:
            setattr(outer, f"{kind}_strategy", strategy_class.STEPS)
            setattr(outer, f"{kind}_steps", 1)
        elif getattr(outer, f"{kind}_steps") == DEFAULT_STEPS:
            setattr(outer, f"{kind}_steps", 1)
    return outer


class RoundDataLoader:
    """
    Data loader of one empty batch. A torch `DataLoader` would draw from the global random generator.

    Args:
        num_examples (`int`): Number of examples of the clients, for the log of the parent trainer.
    """

    def __init__(self, num_examples: int) -> None:
        self.dataset = range(num_examples)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {}


class ServerOptimizer(torch.optim.Optimizer):
    """
    Optimizer that does nothing, because the step of the server is part of the round.

    With FSDP2, accelerate prepares a model only together with an optimizer.
    """

    def __init__(self) -> None:
        super().__init__([{"params": []}], {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch declares two overloads
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Empty. The state of the server is in the `federated/` directory of a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


class RoundScheduler:
    """Schedule that returns the last learning rate of the clients."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def get_last_lr(self) -> list[float]:
        """Mean learning rate of the clients in their last steps."""
        return [self.learning_rate]

    def step(self) -> None:
        """Do nothing, because each client derives the position in its schedule from the round."""

    def state_dict(self) -> dict[str, Any]:
        """The learning rate, for the first log entry after a resume."""
        return {"learning_rate": self.learning_rate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the learning rate."""
        self.learning_rate = state_dict["learning_rate"]


class RoundsCallback(TrainerCallback):
    """
    Announces the training and fires `on_round_end`.

    At the start, it restores the number of training tokens of a resumed run in a trainer of TRL. A round is an epoch
    of the loop. Its end follows the logging, evaluation and saving of the round.

    Args:
        trainer ([`FederatedMixin`]): The federated trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._until_announced.close()
        set_train_tokens(self._trainer, state.num_input_tokens_seen)
        self._trainer._federation.announce(state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._federation.end_round()
